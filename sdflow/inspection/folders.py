"""Folders: a pipeline of diffusers, a component of one, a pipeline that sdflow built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from sdflow.artifact import INDEX_FILE
from sdflow.errors import CheckpointError, SdflowError
from sdflow.families import (
    ARCHITECTURES,
    COMPONENT_ARCHITECTURES,
    FAMILIES,
    family_of_architecture,
    family_of_index,
)
from sdflow.families.base import Family
from sdflow.families.schedulers import prediction
from sdflow.inspection.contents import Contents, precision_of, read_contents
from sdflow.inspection.description import BUILT, PIPELINE, UNKNOWN, Description
from sdflow.inspection.lines import (
    base_of,
    by_part,
    chains_of,
    component_lines,
    configs_of,
    model_lines,
    net_lines,
    part_alone,
    title_of,
    titles_of,
)
from sdflow.manifest import read_manifest
from sdflow.models.base import class_names
from sdflow.sources.architectures import architecture_config, prediction_of
from sdflow.sources.weight_files import find_weights, read_config

CONFIG_FILE = "config.json"


def inspect_built(folder: Path) -> Description:
    """A pipeline that sdflow built. Raises UsageError for a damaged one."""
    manifest = read_manifest(folder)
    origin = manifest.origin
    details = {"name": origin.name, "target": origin.target, "family": origin.family}
    if origin.quantized:
        details["quantized"] = ", ".join(f"{name} to {to}" for name, to in origin.quantized.items())
    missing = tuple(name for name in manifest.files if not (folder / name).exists())
    command = None if missing else f'sdflow generate {folder} --prompt "a horse on the moon"'
    return Description(str(folder), BUILT, details=details, missing=missing, command=command)


def inspect_pipeline(folder: Path) -> Description:
    """A folder with a model_index.json. Raises CheckpointError where that is damaged."""
    index = read_config(folder / INDEX_FILE)
    name = index.get("_class_name")
    family = family_of_index(index)
    if family is None:
        known = ", ".join(name for each in FAMILIES.values() for name in each.classes)
        return Description(
            str(folder),
            UNKNOWN,
            precision=precision_of(_every(folder)),
            details={"class": name},
            notes=(f"A pipeline of class {name!r} is not known to sdflow. Known are {known}.",),
        )
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
    architectures = architectures_of(folder, family, configs)
    architecture, title, base = None, family.title, None
    if architectures:
        architecture = architectures[0]
        title, base = title_of(architecture), base_of(architecture)
    elif not missing:
        title, base = family.title_of(by_part(family, configs)), chains_of(family, configs)
        notes.append("Its configurations are those of none of the architectures that sdflow ships; none is needed.")
    others = {name: family.components[name][0].of(configs[name]).model for name in _instead(family, configs)}
    more: dict[str, str] = {name: fitting for name in others if (fitting := _alone(name, configs[name])) is not None}
    notes += [
        f"Its {name} is an {others[name].class_name} of other sizes than shipped." for name in others.keys() - more
    ]
    bases = () if base is None else (base, *map(base_of, more.values()))
    lines = model_lines(bases, str(folder)) if bases and not missing else None
    if lines and pickled:
        lines += "allow_pickle: true\n"
    classes = {name: model.class_name for name, model in others.items()}
    details = {"class": index["_class_name"], **classes, **_size(configs), "parameters": _count(contents)}
    return Description(
        str(folder),
        PIPELINE,
        (title,),
        architecture,
        precision_of(contents),
        tuple(missing),
        details,
        tuple(notes),
        lines,
    )


def architectures_of(folder: Path, family: Family, configs: Mapping[str, Any]) -> list[str]:
    """The shipped architectures whose shapes these configurations (by component) have; those whose scheduler predicts as
    the folder's does come first."""
    found, instead = [], _instead(family, configs)
    for name in ARCHITECTURES:
        if family_of_architecture(name) is not family:
            continue
        theirs = {part.component: architecture_config(name, part.component) for part in family.parts if part.layouts}
        own = {**configs, **{component: theirs[component] for component in instead}}
        try:
            if family.fingerprint(own) == family.fingerprint(theirs):
                found.append(name)
        except (KeyError, TypeError, StopIteration):
            return []
    try:
        said = prediction(read_config(folder / "scheduler" / "scheduler_config.json", finite=False), "epsilon")
    except CheckpointError:
        return found
    return sorted(found, key=lambda name: prediction_of(name) != said)


def _instead(family: Family, configs: Mapping[str, Any]) -> list[str]:
    """The components that are of another class than the family's own, which may stand in its place."""
    return [name for name, config in configs.items() if (part := family.components[name][0]).of(config) is not part]


def _alone(component: str, config: Mapping[str, Any]) -> str | None:
    """The shipped architecture of this component alone that a config.json has; None where it has none's."""
    for architecture, of in COMPONENT_ARCHITECTURES.items():
        part, own = part_alone(architecture)
        if of != component or part.model.class_name not in class_names(config):
            continue
        if part.model.distinguishing_shapes(own) == _telling(part.model, config):
            return architecture
    return None


def inspect_component(folder: Path) -> Description:
    """A folder with a config.json: one network. Raises CheckpointError where that is damaged."""
    config = read_config(folder / CONFIG_FILE)
    named = class_names(config)
    contents = list(_every(folder))
    precision, details = precision_of(contents), {"class": ", ".join(named), "parameters": _count(contents)}
    fitting: list[str] = []
    component = None
    for architecture in ARCHITECTURES:
        there, family = configs_of(architecture), family_of_architecture(architecture)
        if family.net is not None:
            there[family.net.component] = family.net.model.config_for(there[family.part(family.denoiser).component])
        for part in (*family.parts, *([family.net] if family.net is not None else [])):
            if part.component in there and any(model.class_name in named for model in part.instead):
                component = part.component
            if part.component not in there or part.model.class_name not in named:
                continue
            component = component or part.component
            telling = part.model.distinguishing_shapes(there[part.component])
            if telling and telling == _telling(part.model, config) and architecture not in fitting:
                component = component if fitting else part.component
                fitting.append(architecture)
    if component is not None and (alone := _alone(component, config)) is not None:
        lines = component_lines(alone, component, str(folder)) if contents else None
        missing = () if contents else ("weights",)
        return Description(str(folder), component, (), alone, precision, missing, details, (), lines)
    if component is None:
        said = details["class"] or "of no class that it names"
        return Description(
            str(folder), UNKNOWN, (), None, precision, (), details, (f"No family has a network {said}.",)
        )
    lines = None
    if fitting and contents and component in family_of_architecture(fitting[0]).exchangeable:
        lines = component_lines(fitting[0], component, str(folder))
        lines += "allow_pickle: true\n" if any(each.pickled for each in contents) else ""
    net = family_of_architecture(fitting[0]).net if fitting else None
    if net is not None and component == net.component and contents:
        lines = net_lines(fitting[0], str(folder))
    missing = () if contents else ("weights",)
    kind = component.replace("_", " ")
    return Description(
        str(folder), kind, titles_of(fitting), fitting[0] if fitting else None, precision, missing, details, (), lines
    )


def _telling(model: Any, config: Mapping[str, Any]) -> Any:
    try:
        return model.distinguishing_shapes(config)
    except (KeyError, TypeError, IndexError, StopIteration):
        return None


def _every(folder: Path) -> Iterator[Contents]:
    """The files of weights in a folder and those below: no second copy of any, safetensors before pickles."""
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        files = sorted(place.glob("*.safetensors")) or sorted(place.glob("*.bin"))
        plain = [file for file in files if "." not in file.stem] or files[:1]
        for file in plain:
            try:
                yield read_contents(file)
            except SdflowError:
                continue


def _size(configs: Mapping[str, Any]) -> dict[str, Any]:
    channels = {name: each.get("in_channels") for name, each in configs.items() if "cross_attention_dim" in each}
    return {"channels of the input": next(iter(channels.values()))} if channels else {}


def _count(contents: list[Contents]) -> str | None:
    total = sum(prod(shape) for each in contents for shape in each.shapes.values())
    return f"{total / 1e6:,.0f} million" if total else None
