"""Describe folders: diffusers pipelines, their components, and pipelines built by sdflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE, INDEX_FILE
from sdflow.errors import CheckpointError, SdflowError
from sdflow.families import FAMILIES, family_of_index
from sdflow.families.shared.base import Family
from sdflow.families.shared.schedulers import prediction
from sdflow.inspection.contents import Contents, precision_of, read_contents
from sdflow.inspection.description import BUILT, PIPELINE, Description
from sdflow.inspection.lines import (
    base_of,
    by_part,
    chains_of,
    lines_for_component,
    quoted,
    title_of,
    titles_of,
    workflow,
)
from sdflow.manifest import read_manifest
from sdflow.models.base import class_names
from sdflow.sources.config_recognition import architecture_alone, architectures_of, classes_of_others, recognize_config
from sdflow.sources.recognition import UNKNOWN
from sdflow.sources.weight_files import find_weights, read_config


def inspect_built(folder: Path) -> Description:
    """Describe a pipeline built by sdflow. Raises UsageError if it is damaged."""
    manifest = read_manifest(folder)
    origin = manifest.origin
    details = {"name": origin.name, "target": origin.target, "family": origin.family}
    if origin.quantized:
        details["quantized"] = ", ".join(f"{name} to {to}" for name, to in origin.quantized.items())
    if origin.low_bits:
        details["dequantized from"] = ", ".join(f"{name}: {of}" for name, of in origin.low_bits.items())
    missing = tuple(name for name in manifest.files if not (folder / name).exists())
    command = None if missing else f'sdflow generate {folder} --prompt "a horse on the moon"'
    return Description(str(folder), BUILT, details=details, missing=missing, command=command)


def inspect_pipeline(folder: Path) -> Description:
    """Describe a folder with a model_index.json. Raises CheckpointError if that file is damaged."""
    index = read_config(folder / INDEX_FILE)
    family = family_of_index(index)
    if family is None:
        return _of_no_family(str(folder), index, precision_of(_every(folder)))
    configs: dict[str, Any] = {}
    contents: list[Contents] = []
    missing, notes, pickled = [], [], False
    for component, parts in family.components.items():
        named = index.get(component)
        if parts[0].optional and not (isinstance(named, list) and named and named[0]):
            continue
        try:
            configs[component] = read_config(folder / component / CONFIG_FILE)
            part = parts[0].of(configs[component])
            weights = find_weights(folder / component, part.model, configs[component], allow_pickle=True)
            pickled |= weights.pickled
            contents += [read_contents(file) for file in weights.files]
        except CheckpointError as error:
            missing.append(component.replace("_", " "))
            notes.append(f"{error.where}: {error.what}.")
    for name, companion in family.companions.items():
        there = [part.name for component in configs for part in family.components[component]]
        if companion.wanted(there) and not (folder / name / companion.file).is_file():
            missing.append(name.replace("_", " "))
    known = _known(family, configs, _prediction(folder), whole=not missing)
    notes += known.notes
    others = {name: family.components[name][0].of(configs[name]).model for name in classes_of_others(family, configs)}
    lines = known.workflow(str(folder), pickled=pickled) if not missing else None
    classes = {name: model.class_name for name, model in others.items()}
    details = {"class": index["_class_name"], **classes, **_size(configs), "parameters": _count(contents)}
    return Description(
        str(folder),
        PIPELINE,
        (known.title,),
        known.architecture,
        precision_of(contents),
        tuple(missing),
        details,
        tuple(notes),
        lines,
    )


def inspect_repository(folder: Path, reference: str) -> Description:
    """Describe a hub pipeline by its configurations in a local folder, without its weights.

    Raises CheckpointError if they are damaged.
    """
    index = read_config(folder / INDEX_FILE)
    family = family_of_index(index)
    if family is None:
        return _of_no_family(reference, index, None)
    wanted = {name: index.get(name) for name in family.components}
    named = [name for name, each in wanted.items() if isinstance(each, list) and each and each[0]]
    configs = {name: read_config(folder / name / CONFIG_FILE) for name in named}
    missing = tuple(
        name.replace("_", " ")
        for name, parts in family.components.items()
        if name not in named and not parts[0].optional
    )
    known = _known(family, configs, _prediction(folder), whole=not missing)
    lines = known.workflow(reference) if not missing else None
    details = {"class": index["_class_name"], **_size(configs)}
    return Description(
        reference, PIPELINE, (known.title,), known.architecture, None, missing, details, tuple(known.notes), lines
    )


@dataclass(frozen=True)
class _Known:
    """A pipeline's identity by its configurations. bases: the workflows with its chains."""

    title: str
    architecture: str | None
    bases: tuple[str, ...]
    notes: list[str]

    def workflow(self, model: str, *, pickled: bool = False) -> str | None:
        """Workflow lines for the complete model."""
        return workflow(self.bases, "", model=quoted(model), pickled=pickled) if self.bases else None


def _known(family: Family, configs: Mapping[str, Any], predicted: str | None, *, whole: bool) -> _Known:
    architectures = architectures_of(family, configs, predicted)
    architecture, title, base = None, family.title, None
    notes = []
    if architectures:
        architecture = architectures[0]
        title, base = title_of(architecture), base_of(architecture)
    elif whole:
        title, base = family.title_of(by_part(family, configs)), chains_of(family, configs)
        notes.append("Its configurations match no architecture that sdflow ships; none is needed.")
    others = classes_of_others(family, configs)
    more: dict[str, str] = {
        name: fitting for name in others if (fitting := architecture_alone(name, configs[name])) is not None
    }
    notes += [
        f"Its {name} is an {family.components[name][0].of(configs[name]).model.class_name} of other sizes than shipped."
        for name in others
        if name not in more
    ]
    return _Known(title, architecture, () if base is None else (base, *map(base_of, more.values())), notes)


def _of_no_family(path: str, index: Mapping[str, Any], precision: str | None) -> Description:
    name = index.get("_class_name")
    known = ", ".join(name for each in FAMILIES.values() for name in each.classes)
    notes = (f"A pipeline of class {name!r} is not known to sdflow. Known are {known}.",)
    return Description(path, UNKNOWN, precision=precision, details={"class": name}, notes=notes)


def inspect_component(folder: Path) -> Description:
    """Describe a folder with a config.json: one network. Raises CheckpointError if that file is damaged."""
    config = read_config(folder / CONFIG_FILE)
    contents = list(_every(folder))
    details = {"class": ", ".join(class_names(config)), "parameters": _count(contents)}
    found = recognize_config(config)
    if found.kind == UNKNOWN:
        notes = (f"No family has a network {details['class'] or 'of no class that it names'}.",)
        return Description(str(folder), UNKNOWN, precision=precision_of(contents), details=details, notes=notes)
    pickled = any(each.pickled for each in contents)
    return Description(
        str(folder),
        found.title,
        () if found.alone else titles_of(found.architectures),
        next(iter(found.architectures), None),
        precision_of(contents),
        () if contents else ("weights",),
        details,
        workflow=lines_for_component(found, str(folder), pickled) if contents else None,
    )


def _every(folder: Path) -> Iterator[Contents]:
    """The readable weight files in a folder and its subfolders: safetensors if there are any, else pickles; no variants
    next to plain files."""
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        files = sorted(place.glob("*.safetensors")) or sorted(place.glob("*.bin"))
        plain = [file for file in files if "." not in file.stem] or files[:1]
        for file in plain:
            try:
                yield read_contents(file)
            except SdflowError:
                continue


def _prediction(folder: Path) -> str | None:
    """The prediction type in the scheduler's config of a pipeline folder; None if it is damaged or missing."""
    try:
        return prediction(read_config(folder / "scheduler" / "scheduler_config.json", finite=False))
    except CheckpointError:
        return None


def _size(configs: Mapping[str, Any]) -> dict[str, Any]:
    channels = {name: each.get("in_channels") for name, each in configs.items() if "cross_attention_dim" in each}
    return {"channels of the input": next(iter(channels.values()))} if channels else {}


def _count(contents: list[Contents]) -> str | None:
    total = sum(prod(shape) for each in contents for shape in each.shapes.values())
    return f"{total / 1e6:,.0f} million" if total else None
