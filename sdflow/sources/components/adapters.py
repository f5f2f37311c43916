"""Add IP-Adapters to a checkpoint: an image encoder as a submodel, and matrices in the denoiser.

An adapter's file holds a projection of the image encoder's output (`image_proj.`), which joins the encoder's graph, and
a key and a value matrix for each cross-attention of the denoiser (`ip_adapter.`). As in diffusers, all adapters of a
pipeline use the image encoder of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from sdflow.disk.file_stamp import file_stamp
from sdflow.errors import CheckpointError
from sdflow.families import ADAPTER_ARCHITECTURES
from sdflow.families.shared.part import Part
from sdflow.models.base import Shapes
from sdflow.models.image_encoder import fits_encoder, projection_for, projection_of, read_width, token_count
from sdflow.sources.architectures import architecture_config, companion_folder
from sdflow.sources.checkpoint import Access, Checkpoint, SubmodelCheckpoint, config_digest
from sdflow.sources.components.component_source import Found, Source, tensor_shapes
from sdflow.sources.hub import hub_file
from sdflow.sources.reference import (
    PICKLE_SUFFIXES,
    AdapterReference,
    HubReference,
    LocalReference,
    SyntheticReference,
    parse_reference,
)
from sdflow.sources.safetensors_file import digest_tensors, read_header
from sdflow.sources.single_file import under
from sdflow.sources.synthetic import GENERATOR_VERSION, synthetic_provenance
from sdflow.sources.weight_files import read_config

PREFIXES = ("image_proj.", "ip_adapter.")
"""Prefixes of an adapter's tensors: the projection's, and the denoiser's."""
_PROCESSOR = "feature_extractor"
_PROCESSORS = ("sd15", "sd15-tiny")
"""Architectures whose image processor replaces a missing one: CLIP's, for 224 pixels and for a few."""


@dataclass(frozen=True)
class _Adapter:
    """An opened adapter. projection: with its sizes. content: identity of its tensors by prefix, or of the whole file.
    load: how to load the tensors with a prefix."""

    projection: Mapping[str, Any]
    content: Mapping[str, Mapping[str, Any]]
    load: Mapping[str, Any]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def identity(self, prefix: str) -> Mapping[str, Any]:
        return self.content[prefix if prefix in self.content else ""]


def with_adapters(checkpoint: Checkpoint, adapters: Sequence[AdapterReference], access: Access) -> Checkpoint:
    """The checkpoint with these IP-Adapters: a denoiser with image inputs, and an encoder that makes image tokens.

    Raises CheckpointNotLocal as `open_checkpoint` does, CheckpointError for an adapter that is missing, damaged,
    unsupported, or made for another kind of checkpoint.
    """
    family = checkpoint.family
    prompter = family.prompter
    if prompter is None:
        raise CheckpointError(
            f"sdflow supports no IP-Adapters for {family.title}",
            where=checkpoint.reference,
            remedy="Remove `ip_adapters` from the workflow.",
        )
    for other in adapters[1:]:
        if other.encoder or other.encoder_folder:
            raise CheckpointError(
                "all IP-Adapters of a pipeline use the image encoder of the first",
                where=other.file,
                remedy="Leave out its encoder; adapters with another encoder need their own pipeline.",
            )
    encoder = _Encoder.of(checkpoint, adapters[0], access, prompter).open()
    own = encoder.submodels[prompter.name]
    denoiser = checkpoint.submodels[family.denoiser]
    width = int(denoiser.load["config"]["cross_attention_dim"])
    opened = []
    for adapter in adapters:
        found = _open(adapter, own.load["config"], width, access)
        _require_fitting(found, own.load["config"], checkpoint, adapter)
        opened.append(found)
    projections, tokens = [each.projection for each in opened], [token_count(each.projection) for each in opened]
    submodels = {
        **checkpoint.submodels,
        family.denoiser: _joined(family.part(family.denoiser), denoiser, opened, tokens),
        prompter.name: _joined(prompter, own, opened, projections),
    }
    provenance = {str(index): dict(each.provenance) for index, each in enumerate(opened)}
    provenance["encoder"] = dict(encoder.provenance)
    notes = [*(note for each in opened for note in each.notes), *encoder.notes]
    return replace(
        checkpoint,
        submodels=submodels,
        companions={**checkpoint.companions, _PROCESSOR: _processor(checkpoint, own.load["config"]["image_size"])},
        provenance={**checkpoint.provenance, "ip_adapters": provenance},
        notes=(*checkpoint.notes, *(f"IP-Adapter: {each.file}." for each in adapters), *notes),
    )


def _joined(
    part: Part, submodel: SubmodelCheckpoint, adapters: Sequence[_Adapter], entry: Sequence[Any]
) -> SubmodelCheckpoint:
    """A submodel with its part of the adapters' files. entry: for its config, one value per adapter."""
    assert part.adapted is not None
    config, prefix = {**submodel.load["config"], part.adapted.entry: list(entry)}, part.adapted.layout.prefix
    return SubmodelCheckpoint(
        identity={
            **submodel.identity,
            "config": config_digest(config),
            "adapters": [each.identity(prefix) for each in adapters],
        },
        load={**submodel.load, "config": config, "adapters": [{**each.load, "prefix": prefix} for each in adapters]},
    )


def _open(adapter: AdapterReference, encoder: Mapping[str, Any], width: int, access: Access) -> _Adapter:
    """encoder: the config of the adapter's encoder. width: of the tokens that the denoiser reads."""
    parsed = parse_reference(adapter.file)
    if isinstance(parsed, SyntheticReference):
        if parsed.architecture not in ADAPTER_ARCHITECTURES:
            raise CheckpointError(
                "is not an IP-Adapter", where=adapter.file, remedy=f"Known: {', '.join(ADAPTER_ARCHITECTURES)}."
            )
        written = architecture_config(parsed.architecture, "image_projection")
        known = {name: value for name, value in written.items() if value is not None}
        identity = {"kind": "synthetic", "seed": parsed.seed, "generator": GENERATOR_VERSION}
        return _Adapter(
            projection=projection_for(known, encoder, width),
            content={"": identity},
            load={"kind": "synthetic", "seed": parsed.seed},
            provenance=synthetic_provenance(parsed.architecture, parsed.seed),
        )
    path, origin = _file(adapter, access.download)
    pickled = path.suffix.lower() in PICKLE_SUFFIXES
    stamp = file_stamp(path)  # before the digests, so that a change in between is found on loading
    shapes = tensor_shapes(path, access)
    require_adapter(path, shapes)
    begins = PREFIXES[0]
    projection = projection_of(
        {name.removeprefix(begins): shape for name, shape in shapes.items() if name.startswith(begins)}, str(path)
    )
    whole = access.digests.digest(path)
    content: dict[str, Mapping[str, Any]] = {"": {"file": whole}}
    if not pickled:
        for prefix in PREFIXES:
            compute = partial(digest_tensors, entries=under(read_header(path), prefix))
            content[prefix] = {"tensors": access.digests.value(path, f"tensors-1/{prefix}", compute)}
    return _Adapter(
        projection=projection,
        content=content,
        load={"kind": "files", "files": [stamp], "pickled": pickled},
        provenance={**origin, "files": {path.name: whole}},
        notes=(f"{path.name} is pickled; it is loaded with weights_only=True.",) if pickled else (),
    )


def _file(adapter: AdapterReference, download: bool) -> tuple[Path, dict[str, Any]]:
    """The adapter's file, and its provenance as JSON."""
    parsed = parse_reference(adapter.file)
    if isinstance(parsed, HubReference):
        if adapter.weight_name is None:
            raise CheckpointError(
                "the file name is missing",
                where=adapter.file,
                remedy="Write weight_name: models/ip-adapter_sd15.safetensors, or another.",
            )
        path = hub_file(parsed, adapter.weight_name, download=download)
        commit = path.parents[len(PurePosixPath(adapter.weight_name).parts) - 1].name
        return path, {
            "kind": "hub", "repository": parsed.repository, "revision": parsed.revision, "commit": commit,
        }  # fmt: skip
    if not isinstance(parsed, LocalReference) or parsed.architecture is not None:
        raise CheckpointError(
            "is not an IP-Adapter", where=adapter.file, remedy="Name its file, or synthetic:ip-adapter."
        )
    path = parsed.path / adapter.weight_name if adapter.weight_name else parsed.path
    if not path.is_file() or path.suffix.lower() not in (".safetensors", *PICKLE_SUFFIXES):
        raise CheckpointError(
            "no such file" if not path.exists() else "is not the file of an IP-Adapter",
            where=str(path),
            remedy="Name a .safetensors or .bin file; for a folder or repository, add weight_name.",
        )
    return path, {"kind": "single_file", "path": str(path.absolute())}


def require_adapter(path: Path, shapes: Shapes) -> None:
    """Raises CheckpointError for a file with other content, or an adapter with LoRAs."""
    for prefix in PREFIXES:
        if not any(name.startswith(prefix) for name in shapes):
            raise CheckpointError(
                f"no tensor begins with {prefix}: this is not an IP-Adapter",
                where=str(path),
                remedy="Name an IP-Adapter's file, such as ip-adapter_sd15.safetensors.",
            )
    if any("_lora." in name for name in shapes):
        raise CheckpointError(
            "is an IP-Adapter FaceID, which is not supported: it needs a face embedding and a LoRA",
            where=str(path),
            remedy="Supported are plain, plus, plus-face and light IP-Adapters.",
        )


def _require_fitting(
    found: _Adapter, encoder: Mapping[str, Any], checkpoint: Checkpoint, adapter: AdapterReference
) -> None:
    """Raises CheckpointError for an adapter made for another encoder or another kind of denoiser."""
    family, where = checkpoint.family, adapter.weight_name or adapter.file
    if not fits_encoder(found.projection, encoder):
        raise CheckpointError(
            f"it reads embeddings {read_width(found.projection)} wide, but the image encoder is {encoder['hidden_size']} wide "
            f"and projects to {encoder['projection_dim']}",
            where=where,
            remedy="Name its `encoder`, or its `encoder_folder`: vit-h adapters for XL use that of 1.5.",
        )
    denoiser = checkpoint.submodels[family.denoiser].load["config"]
    tokens = next(found.projection[name] for name in ("cross_attention_dim", "output_dims") if name in found.projection)
    if tokens != denoiser["cross_attention_dim"]:
        raise CheckpointError(
            f"it makes tokens {tokens} wide, but {checkpoint.reference} reads {denoiser['cross_attention_dim']}",
            where=where,
            remedy=f"Name an IP-Adapter for {family.title}, of the same generation.",
        )


def _processor(checkpoint: Checkpoint, size: int) -> Path:
    """The folder of the image processor for the encoder: the checkpoint's own, as in diffusers, or CLIP's.

    Raises CheckpointError if it makes images of another size.
    """
    own = checkpoint.companions.get(_PROCESSOR)
    file = checkpoint.family.companions[_PROCESSOR].file
    known = [own] if own is not None else [companion_folder(name, _PROCESSOR) for name in _PROCESSORS]
    sizes = [_crop(read_config(folder / file, finite=False)) for folder in known]
    if (size, size) not in sizes:
        raise CheckpointError(
            f"the image encoder reads {size} pixels, but the {_PROCESSOR.replace('_', ' ')} makes "
            + " or ".join(f"{height} x {width}" for height, width in sizes),
            where=str(known[0]) if own is not None else checkpoint.reference,
            remedy="Name the image encoder that the IP-Adapter was trained with.",
        )
    return known[sizes.index((size, size))]


def _crop(config: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of an image processor's output; older releases wrote one number for both."""
    crop = config.get("crop_size", 224)
    return (crop["height"], crop["width"]) if isinstance(crop, Mapping) else (crop, crop)


@dataclass(frozen=True)
class _Encoder(Source):
    """The source of the image encoder. component: its folder there."""

    part: Part

    @classmethod
    def of(cls, checkpoint: Checkpoint, adapter: AdapterReference, access: Access, part: Part) -> _Encoder:
        """The encoder of an adapter, by diffusers' rules: a folder next to the adapter's file, or, with a slash in its
        name, one of the whole folder or repository."""
        parsed, folder = parse_reference(adapter.file), adapter.encoder_folder or part.component
        reference, parent = adapter.encoder or adapter.file, PurePosixPath(adapter.weight_name or "").parent
        if adapter.encoder is None and "/" not in folder:
            folder = (parent / folder).as_posix()
        if adapter.encoder is None and isinstance(parsed, LocalReference) and not parsed.path.is_dir():
            reference = str(parsed.path.parent)
        return cls(checkpoint, folder, reference, access, part)

    @property
    def parts(self) -> Sequence[Part]:
        return (self.part,)

    def synthetic(self, parsed: SyntheticReference) -> Found:
        try:
            config = architecture_config(parsed.architecture, self.part.component)
        except FileNotFoundError:
            raise CheckpointError(
                "is not an IP-Adapter", where=self.reference, remedy="Name synthetic:ip-adapter or another one."
            ) from None
        submodel = self.synthetic_part(self.part, config, parsed.seed)
        return Found({self.part.name: submodel}, synthetic_provenance(parsed.architecture, parsed.seed))

    def _file(self, path: Path, origin: Mapping[str, Any] | None = None) -> Found:
        raise CheckpointError(
            "an image encoder is a folder with its configuration",
            where=str(path),
            remedy="Name a folder written by save_pretrained: config.json and model.safetensors.",
        )
