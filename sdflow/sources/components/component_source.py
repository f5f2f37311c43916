"""Sources of components, ControlNets and image encoders.

A source is a component's folder or repository, as written by save_pretrained; a pipeline with the component; a
synthetic checkpoint or a sample; or one file of tensors, with diffusers' or the original names. A file has no
configuration: the checkpoint's own is used, adjusted to the file's tensors, whose shapes must match. The first TAESD
files hold one half each, in the original names: one is named, and the other one is next to it, with the other half in
its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sdflow.digest import digest_json
from sdflow.disk.file_stamp import file_stamp
from sdflow.disk.input_file import is_regular, no_file
from sdflow.disk.shipped import sample_folder
from sdflow.errors import CheckpointError
from sdflow.families import COMPONENT_ARCHITECTURES
from sdflow.families.shared.part import Part
from sdflow.models.base import Shapes
from sdflow.sources.architectures import architecture_config
from sdflow.sources.checkpoint import (
    Access,
    Checkpoint,
    MissingFile,
    SubmodelCheckpoint,
    side_by_side,
)
from sdflow.sources.components.halves import begins_of, files_of_halves
from sdflow.sources.folder import open_component, pinned
from sdflow.sources.formats import WeightsFile, open_weights
from sdflow.sources.hub import component_files, hub_weights, open_snapshot
from sdflow.sources.recognition import component_alone
from sdflow.sources.reference import (
    FILE_SUFFIXES,
    PICKLE_SUFFIXES,
    HubReference,
    LocalReference,
    SampleReference,
    SyntheticReference,
    parse_reference,
)
from sdflow.sources.single_file import digest_work, part_of_file
from sdflow.sources.synthetic import open_synthetic, synthetic_provenance, synthetic_submodel
from sdflow.sources.weight_files import refuse_pickle


@dataclass(frozen=True)
class Found:
    """An opened component: its parts by name, and JSON for the manifest. notes: for the user."""

    submodels: Mapping[str, SubmodelCheckpoint]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """The source of a component, and the checkpoint that it is for."""

    checkpoint: Checkpoint
    component: str
    reference: str
    access: Access

    @property
    def parts(self) -> Sequence[Part]:
        return self.checkpoint.family.components[self.component]

    def open(self) -> Found:
        parsed = parse_reference(self.reference)
        if isinstance(parsed, SyntheticReference):
            return self.synthetic(parsed)
        if isinstance(parsed, SampleReference):
            return self._folder(sample_folder(parsed.name), {"kind": "sample", "name": parsed.name})
        if isinstance(parsed, HubReference | LocalReference) and parsed.architecture is not None:
            raise CheckpointError(
                f"a {self.component} takes its architecture from the checkpoint",
                where=self.reference,
                remedy=f"Leave out #{parsed.architecture}.",
            )
        if isinstance(parsed, HubReference) and parsed.file:
            return self._file(*hub_weights(parsed, download=self.access.download))
        if isinstance(parsed, HubReference):
            return open_snapshot(parsed, self._folder, partial(self._needed, parsed), download=self.access.download)
        path = parsed.path
        if path.is_dir():
            return self._folder(path, {"kind": "folder", "path": str(path.absolute())})
        if path.suffix.lower() in (*FILE_SUFFIXES, *PICKLE_SUFFIXES) and is_regular(path):
            return self._file(path)
        raise CheckpointError(
            f"the file type {path.suffix!r} is unknown" if is_regular(path) else no_file(path),
            where=str(path),
            remedy="Name a folder, a .safetensors or .gguf file, hf:owner/name[@revision], synthetic:sd15 or sample:NAME.",
        )

    def synthetic(self, parsed: SyntheticReference) -> Found:
        """Open a shipped architecture with random weights."""
        if parsed.architecture in COMPONENT_ARCHITECTURES:
            return self._alone(parsed)
        other = open_synthetic(self.reference, parsed.architecture, parsed.seed)
        family = self.checkpoint.family.name
        submodels = {
            part.name: replace(found, load={**found.load, "family": family})
            for part in self.parts
            if (found := other.submodels.get(part.name)) is not None
        }
        if len(submodels) < len(self.parts):
            raise CheckpointError(f"has no {self.component}", where=self.reference, remedy="Name a model that has one.")
        return Found(submodels, other.provenance)

    def _alone(self, parsed: SyntheticReference) -> Found:
        """Open a shipped architecture of only this component, with random weights."""
        if COMPONENT_ARCHITECTURES[parsed.architecture] != self.component:
            raise CheckpointError(
                f"is not a {self.component}",
                where=self.reference,
                remedy=f"Name an architecture of a {self.component} alone.",
            )
        config = architecture_config(parsed.architecture, self.component)
        parts = {part.name: self.synthetic_part(part, config, parsed.seed) for part in self.parts}
        return Found(parts, synthetic_provenance(parsed.architecture, parsed.seed, parts))

    def synthetic_part(self, part: Part, config: Mapping[str, Any], seed: int) -> SubmodelCheckpoint:
        """A part with random weights."""
        return synthetic_submodel(part.of(config).model, config, seed, self.checkpoint.family.name)

    def _folder(self, folder: Path, origin: Mapping[str, Any]) -> Found:
        """Open the component's own folder, or a pipeline's with the component."""
        inner = folder / self.component
        place = inner if (inner / "config.json").is_file() else folder
        if not (place / "config.json").is_file():
            raise MissingFile(
                f"holds neither {self.component}/config.json nor config.json", where=str(folder), remedy=self._as_saved
            )
        family = self.checkpoint.family
        opened = open_component(place, self.component, self.parts[0], family, self.access.allow_pickle)
        sum_of = opened.digests(self.access.digests)
        return Found(
            {
                part.name: opened.submodel(part, self._config_of(part, opened.config), family, sum_of, pinned(origin))
                for part in self.parts
            },
            {**origin, "files": {file.relative_to(folder).as_posix(): sha for file, sha in sum_of.items()}},
            opened.notes,
        )

    def _config_of(self, part: Part, config: Mapping[str, Any]) -> dict[str, Any]:
        """A part's config.json with entries set by the family and by the checkpoint's model_index.json."""
        return {**config, **part.config, **{name: self.checkpoint.options[name] for name in part.options}}

    def _needed(self, hub: HubReference, names: Collection[str]) -> list[str]:
        inner = f"{self.component}/"
        wanted = component_files(names, inner if f"{inner}config.json" in names else "", self.parts[0].model)
        if not any(name.endswith("config.json") for name in wanted):
            raise CheckpointError(
                f"holds neither {inner}config.json nor config.json",
                where=f"hf:{hub.repository}@{hub.revision}",
                remedy=f"{self._as_saved} For a single file of a repository: hf:{hub.repository}/FILE.",
            )
        return wanted

    @property
    def _as_saved(self) -> str:
        return f"Name a folder written by save_pretrained: of the {self.component}, or of a pipeline with one."

    def _file(self, path: Path, origin: Mapping[str, Any] | None = None) -> Found:
        stamp = file_stamp(path)  # before the digests, so that a change in between is found on loading
        opened = self._opened(path)
        shapes = tensor_shapes(path, self.access) if opened is None else opened.shapes
        parts, prefix = self.parts, None
        if (alone := component_alone(shapes, self.component)) is not None:
            architecture, half = alone
            config = architecture_config(architecture, self.component)
            if half is not None:
                return self._halves(path, config)
            parts, configs = [part.of(config) for part in self.parts], {part.name: config for part in self.parts}
        else:
            prefix = self.prefix(shapes)
            inside = {name.removeprefix(prefix or ""): shape for name, shape in shapes.items()}
            configs = {part.name: {**part.model.config_from_shapes(self.own_config(part), inside)} for part in parts}
            self.require_shapes(path, shapes, prefix)
        whole, *tensors = side_by_side(self._work(path, opened, prefix or ""))
        content = {"tensors": tensors[0]} if tensors else {"file": whole}
        return Found(
            {
                part.name: part_of_file(part, configs[part.name], self.checkpoint.family, content, stamp, prefix)
                for part in parts
            },
            {
                **(origin or {"kind": "single_file", "path": str(path.absolute())}),
                "files": {path.name: whole},
                **({} if opened is None else opened.provenance()),
            },
            (f"{self.component}: {path.name} is pickled; it is loaded with weights_only=True.",)
            if opened is None
            else opened.notes,
        )

    def _opened(self, path: Path) -> WeightsFile | None:
        """Open a weight file; None for a pickle."""
        if path.suffix.lower() in PICKLE_SUFFIXES:
            return None
        opened = open_weights(path)
        opened.require_read()
        return opened

    def _work(self, path: Path, opened: WeightsFile | None, prefix: str) -> list[Callable[[], str]]:
        """Work that computes the digests of a file and, unless it is a pickle, of its tensors under the prefix."""
        work: list[Callable[[], str]] = [partial(self.access.digests.digest, path)]
        if opened is not None:
            work.append(digest_work(opened, self.component, prefix, self.access))
        return work

    def _halves(self, path: Path, config: Mapping[str, Any]) -> Found:
        """Open the files of both halves, one of which is named. config: of the whole, which neither file has."""
        parts = [part.of(config) for part in self.parts]
        shapes_of = partial(tensor_shapes, access=self.access)
        files = files_of_halves(path, parts[0].model.halves(config), shapes_of)
        stamps = [file_stamp(file) for file in files.values()]  # before the digests
        sums = [side_by_side(self._work(file, self._opened(file), "")) for file in files.values()]
        pickled = len(sums[0]) == 1
        content = {"file" if pickled else "tensors": digest_json([each[-1] for each in sums])}
        submodels = {}
        for part in parts:
            made = part_of_file(part, config, self.checkpoint.family, content, stamps[0], "")
            submodels[part.name] = replace(made, load={**made.load, "files": stamps, "begins": begins_of(files)})
        names = " and ".join(file.name for file in files.values())
        return Found(
            submodels,
            {
                "kind": "single_file",
                "path": str(path.absolute()),
                "files": {file.name: each[0] for file, each in zip(files.values(), sums, strict=True)},
            },
            (f"{self.component}: {names} are pickled; they are loaded with weights_only=True.",) if pickled else (),
        )

    def own_config(self, part: Part) -> dict[str, Any]:
        """The config.json for a part whose file has none."""
        return dict(self.checkpoint.submodels[part.name].load["config"])

    def prefix(self, names: Iterable[str]) -> str | None:
        """The prefix of the component's names in a file with the original layout; None for diffusers' names."""
        names = list(names)
        if not self.parts[0].layouts:
            return None
        for layout in self.parts[0].layouts:
            if any(name.startswith(layout.prefix) for name in names):
                return layout.prefix
        # Blocks are called `down_blocks.0` in diffusers, `down.0` or `input_blocks.0` in the original layouts; for
        # transformers `transformer_blocks.0` and `joint_blocks.0`.
        blocks = any("down_blocks." in name or "up_blocks." in name for name in names)
        return None if blocks or any(name.startswith("transformer_blocks.") for name in names) else ""

    def require_shapes(self, path: Path, shapes: Shapes, prefix: str | None) -> None:
        """Raises CheckpointError if a tensor that distinguishes architectures is missing or has another shape.

        Whether every tensor fits shows on loading.
        """
        family, part = self.checkpoint.family, self.parts[0]
        if part.name in family.text:  # pipelines' fingerprints do not cover it
            if prefix is None or part.layout(prefix).names is None:  # otherwise `fit` maps its names
                current = {
                    part.model.current_name(name.removeprefix(prefix or "")): each for name, each in shapes.items()
                }
                for name, shape in part.model.distinguishing_shapes(self.own_config(part)).items():
                    self._require_shape(path, current, name, shape)
            return
        begins = part.layouts[0].prefix
        configs = {part.component: self.checkpoint.submodels[part.name].load["config"] for part in family.parts
                   if part.name in self.checkpoint.submodels}  # fmt: skip
        ours: dict[str, str] = {}
        if prefix is None:
            ours = {each.name: name for name, each in part.model.original_names(shapes).items()}
        for name, wanted in family.fingerprint(configs).items():
            if not name.startswith(begins) or wanted is None:
                continue
            plain = name.removeprefix(begins)
            self._require_shape(path, shapes, ours.get(plain, f"{prefix or ''}{plain}"), wanted)

    def _require_shape(self, path: Path, shapes: Shapes, name: str, wanted: tuple[int, ...]) -> None:
        if name not in shapes:
            raise CheckpointError(
                f"tensor {name} is missing: this is not a {self.component}",
                where=str(path),
                remedy=f"Name a file with a {self.component} or a whole checkpoint.",
            )
        if shapes[name] != wanted:
            raise CheckpointError(
                f"{name} is {list(shapes[name])}, but that of {self.checkpoint.reference} is {list(wanted)}",
                where=str(path),
                remedy=f"Name a {self.component} for {self.checkpoint.family.title}.",
            )


def tensor_shapes(path: Path, access: Access) -> Shapes:
    """The shapes of a file's tensors; a pickle's are cached. Raises CheckpointError for a pickle without permission."""
    if path.suffix.lower() not in PICKLE_SUFFIXES:
        return open_weights(path).shapes
    refuse_pickle(path, access.allow_pickle)
    known = json.loads(access.digests.value(path, "pickled-shapes-1", _shapes_as_json))
    return {name: tuple(shape) for name, shape in known.items()}


def _shapes_as_json(path: Path) -> str:
    from sdflow.sources.load import pickled_shapes

    return json.dumps(pickled_shapes(path)[0])
