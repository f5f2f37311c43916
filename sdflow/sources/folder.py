"""Open a checkpoint in a diffusers folder: `model_index.json` and one folder per component."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sdflow.disk.file_stamp import Stamp, file_stamp
from sdflow.disk.input_file import is_there
from sdflow.errors import CheckpointError
from sdflow.families import FAMILIES, family_of_index
from sdflow.families.shared.base import Family
from sdflow.families.shared.part import Part
from sdflow.models.base import Model, class_names
from sdflow.sources.checkpoint import (
    Access,
    Checkpoint,
    FileDigests,
    SubmodelCheckpoint,
    config_digest,
    pipeline_facts,
    read_options,
    side_by_side,
    submodels_of,
)
from sdflow.sources.companions import companion_files, require_inside
from sdflow.sources.formats import open_weights
from sdflow.sources.formats.quantized_safetensors import FLOAT8_ALONE
from sdflow.sources.formats.refused import refused_method
from sdflow.sources.weight_files import Weights, find_weights, read_config


@dataclass(frozen=True)
class ComponentFiles:
    """A component's opened folder. stamps: of the weights. notes: for the user."""

    folder: Path
    config: dict[str, Any]
    weights: Weights
    stamps: list[Stamp]
    notes: tuple[str, ...]

    def digests(self, digests: FileDigests) -> dict[Path, str]:
        """The digest of each weight file."""
        files = self.weights.files
        return dict(zip(files, side_by_side([partial(digests.digest, file) for file in files]), strict=True))

    def submodel(
        self,
        part: Part,
        config: Mapping[str, Any],
        family: Family,
        sum_of: Mapping[Path, str],
        pinned: Mapping[str, Any],
    ) -> SubmodelCheckpoint:
        """A part made from this component. config: including entries that the family sets. pinned: joins the
        identity."""
        return SubmodelCheckpoint(
            identity={
                "kind": "files",
                "class": part.of(config).model.class_name,
                "config": config_digest(config),
                "weights": sorted(sum_of[file] for file in self.weights.files),
                **pinned,
            },
            load={
                "kind": "files",
                "family": family.name,
                "config": config,
                "folder": str(self.folder.absolute()),
                "files": self.stamps,
                "pickled": self.weights.pickled,
            },
        )


def open_folder(
    folder: Path,
    reference: str,
    access: Access,
    *,
    origin: Mapping[str, Any] | None = None,
    left_out: Collection[str] = (),
    replaced: Collection[str] = (),
) -> Checkpoint:
    """Open the checkpoint in a diffusers folder.

    origin: JSON that joins the provenance and, except "kind" and "repository", every identity (the hub's commit).
    left_out: optional components to skip, as if model_index.json did not name them. replaced: components from other
        sources, whose weights may be missing.

    Raises CheckpointError naming the file for anything missing, damaged or unsupported.
    """
    origin = {"kind": "folder", "path": str(folder.absolute())} if origin is None else dict(origin)
    family, index = _pipeline_index(folder)
    found: dict[str, ComponentFiles] = {}
    configs: dict[str, Any] = {"scheduler": read_config(folder / "scheduler" / "scheduler_config.json", finite=False)}
    files: dict[str, str] = {}
    for component, parts in family.components.items():
        if parts[0].optional and (component in left_out or index.get(component, [None])[0] is None):
            continue
        found[component] = open_component(
            folder / component,
            component,
            parts[0],
            family,
            access.allow_pickle,
            declared=index.get(component),
            replaced=component in replaced,
        )
        configs[component] = found[component].config
    every = [file for component in found.values() for file in component.weights.files]
    sum_of = dict(zip(every, side_by_side([partial(access.digests.digest, file) for file in every]), strict=True))
    files |= {file.relative_to(folder).as_posix(): sha for file, sha in sum_of.items()}

    def build(part: Part, config: Mapping[str, Any]) -> SubmodelCheckpoint:
        return found[part.component].submodel(part, config, family, sum_of, pinned(origin))

    submodels = submodels_of(family, {name: configs[name] for name in found}, read_options(family, index), build)
    companions = _companions(folder, family, submodels)
    small = sorted(place / name for place in companions.values() for name in companion_files(place))
    stamps = [file_stamp(path) for path in small]  # before the digests
    for path in small:
        files[path.relative_to(folder).as_posix()] = access.digests.digest(path)
    return Checkpoint(
        family=family,
        reference=reference,
        provenance={**origin, "files": files},
        submodels=submodels,
        companions=companions,
        facts={
            **_facts(folder, family, configs),
            "requires_safety_checker": family.checker not in left_out
            and bool(index.get("requires_safety_checker", family.checker in submodels)),
        },
        index=read_config(folder / "model_index.json"),
        options=read_options(family, index),
        notes=tuple(note for component in found.values() for note in component.notes),
        companion_stamps=tuple(stamps),
    )


def pinned(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an origin that joins identities: the hub's commit."""
    return {key: value for key, value in origin.items() if key == "commit"}


def open_component(
    folder: Path,
    component: str,
    part: Part,
    family: Family,
    allow_pickle: bool,
    *,
    declared: Any = None,
    replaced: bool = False,
) -> ComponentFiles:
    """Open a component's folder: config.json, checked for the part's class or a replacement, and weights.

    declared: library and class from model_index.json, by which diffusers loads it; used if config.json names no class.
    replaced: only its configuration is needed.

    Raises CheckpointError naming the file for anything missing, damaged or of another class.
    """
    model = part.of(read_config(folder / "config.json")).model
    config = _component_config(folder, model, family, declared)
    if replaced:
        return ComponentFiles(folder, config, Weights((), "", pickled=False), [], ())
    if (method := refused_method(config)) is not None:
        raise CheckpointError(
            f"its weights are quantized ({method}), which sdflow does not read from a folder",
            where=str(folder / "config.json"),
            remedy="Use the model's float16, bfloat16 or float32 weights, or a GGUF or float8 file under `components`.",
        )
    weights = find_weights(folder, model, config, allow_pickle=allow_pickle)
    notes = []
    if weights.variant:
        notes.append(f"{component}: only the variant {weights.variant} has weights; it is used.")
    if weights.pickled:
        notes.append(f"{component}: the weights are pickled; they are loaded with weights_only=True.")
    else:
        for file in weights.files:
            _require_plain(file)
    # Before the digests, so that a change in between is found on loading.
    return ComponentFiles(folder, config, weights, [file_stamp(file) for file in weights.files], tuple(notes))


def _require_plain(file: Path) -> None:
    """Raises CheckpointError for weights that the component's library would read differently."""
    opened = open_weights(file)
    opened.require_read()
    if opened.format not in (None, FLOAT8_ALONE):
        raise CheckpointError(
            f"its weights are {opened.format}, which neither diffusers nor transformers supports in a folder",
            where=str(file),
            remedy="Name the file under `components`, with a model that has the rest.",
        )


def _pipeline_index(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family of a pipeline's class, and model_index.json without missing components."""
    path = folder / "model_index.json"
    if not is_there(path):
        _refuse_others(folder)
    index = read_config(path)
    family = family_of_index(index)
    if family is None:
        pipeline = index.get("_class_name")
        known = [name for family in FAMILIES.values() for name in family.classes]
        raise CheckpointError(
            f"a pipeline of class {pipeline!r} is not supported",
            where=str(path),
            remedy=f"Supported: {', '.join(known)}.",
        )
    for component, parts in family.components.items():
        if parts[0].optional and (not isinstance(index.get(component, []), list) or index.get(component) == []):
            index.pop(component, None)
    return family, index


def _refuse_others(folder: Path) -> None:
    """Raises CheckpointError for a folder without model_index.json that is recognized as something else."""
    if is_there(folder / "adapter_config.json") or is_there(folder / "pytorch_lora_weights.safetensors"):
        raise CheckpointError("this is the folder of a LoRA", where=str(folder), remedy="Name it under `loras`.")
    if is_there(folder / "config.json"):
        named = ", ".join(class_names(read_config(folder / "config.json"))) or "an unnamed class"
        raise CheckpointError(
            f"this is one component, {named:.200}, not a pipeline",
            where=str(folder),
            remedy="Name the folder with model_index.json; a VAE, UNet or ControlNet goes under `components` or "
            "`controlnets`.",
        )


def _component_config(folder: Path, model: Model, family: Family, declared: Any) -> dict[str, Any]:
    path = folder / "config.json"
    config = read_config(path)
    named = class_names(config)
    if not named and isinstance(declared, list) and len(declared) == 2:
        named = [str(declared[1])]
    if model.class_name not in named:
        said = f"of {', '.join(named)}" if named else "without a class name"
        raise CheckpointError(
            f"a configuration {said:.200}, not of {model.class_name}",
            where=str(path),
            remedy=f"Use a {family.title} checkpoint, or one with the same submodels.",
        )
    return config


def _facts(folder: Path, family: Family, configs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return pipeline_facts(family, configs)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the configurations of {', '.join(configs)} are incomplete: {error}",
            where=str(folder),
            remedy="Save the checkpoint again with a current diffusers.",
        ) from error


def _companions(folder: Path, family: Family, submodels: Collection[str]) -> dict[str, Path]:
    from sdflow.sources.companion_entries import wrong_entry

    wanted = {name: companion for name, companion in family.companions.items() if companion.wanted(submodels)}
    for name, companion in wanted.items():
        path = folder / name / companion.file
        if wrong := wrong_entry(read_config(path, finite=False)):
            raise CheckpointError(wrong, where=str(path), remedy="Download it again.")
        require_inside(folder / name, folder)
    return {name: folder / name for name in wanted}
