"""Recognize a component or a pipeline by its configs, as `sdflow.sources.recognition` does by tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdflow.families import ARCHITECTURES, COMPONENT_ARCHITECTURES, family_of_architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.part import Part
from sdflow.models.base import Config, Shapes, class_names
from sdflow.sources.architectures import architecture_config, architecture_index, prediction_of
from sdflow.sources.checkpoint import ORIGIN_KEYS
from sdflow.sources.recognition import COMPONENT, UNKNOWN, Recognized, part_alone

_OF_WEIGHTS = frozenset({"torch_dtype", "dtype"})
"""Entries for the weights' type: the files show it, and each graph has its own."""
_ABSENT = object()


def recognize_config(config: Config) -> Recognized:
    """Recognize a config.json: a component of the architectures with its shapes, or UNKNOWN."""
    named, fitting = class_names(config), list[str]()
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
            wanted = part.model.distinguishing_shapes(there[part.component])
            if wanted and wanted == _distinguishing_shapes(part, config) and architecture not in fitting:
                component = component if fitting else part.component
                fitting.append(architecture)
    if component is None:
        return Recognized(UNKNOWN)
    alone = architecture_alone(component, config)
    return Recognized(COMPONENT, tuple(fitting) if alone is None else (alone,), (component,))


def architecture_alone(component: str, config: Config) -> str | None:
    """The shipped single-component architecture that matches a config.json; None if there is none."""
    for architecture, of in COMPONENT_ARCHITECTURES.items():
        part, own = part_alone(architecture)
        if of != component or part.model.class_name not in class_names(config):
            continue
        if part.model.distinguishing_shapes(own) == _distinguishing_shapes(part, config):
            return architecture
    return None


def architectures_of(family: Family, configs: Mapping[str, Config], prediction: str | None) -> list[str]:
    """The shipped architectures with the shapes of these configs (by component); those with this prediction come
    first."""
    found, others = [], classes_of_others(family, configs)
    for name in ARCHITECTURES:
        if family_of_architecture(name) is not family:
            continue
        theirs = {part.component: architecture_config(name, part.component) for part in family.parts if part.layouts}
        own = {**configs, **{component: theirs[component] for component in others}}
        try:
            if family.fingerprint(own) == family.fingerprint(theirs):
                found.append(name)
        except (KeyError, TypeError, StopIteration):
            return []
    return found if prediction is None else sorted(found, key=lambda name: prediction_of(name) != prediction)


def classes_of_others(family: Family, configs: Mapping[str, Config]) -> list[str]:
    """The components whose class replaces the family's own."""
    return [name for name, config in configs.items() if (part := family.components[name][0]).of(config) is not part]


def configs_of(architecture: str) -> dict[str, Config]:
    """The config.json of each component with weights of a shipped architecture."""
    index = architecture_index(architecture)
    family = family_of_architecture(architecture)
    return {name: architecture_config(architecture, name) for name in family.components if index.get(name, [None])[0]}


def _distinguishing_shapes(part: Part, config: Config) -> Shapes | None:
    """None for an incomplete config."""
    try:
        return part.model.distinguishing_shapes(config)
    except (KeyError, TypeError, IndexError, StopIteration):
        return None


def same_architecture(config: Mapping[str, Any], other: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether both make the same module. defaults: of entries that one of them may lack."""
    for key in {*config, *other} - ORIGIN_KEYS - _OF_WEIGHTS:
        default = defaults.get(key, _ABSENT)
        one, two = config.get(key, default), other.get(key, default)
        if one is _ABSENT or two is _ABSENT:
            return False
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            if not same_architecture(one, two, default if isinstance(default, Mapping) else {}):
                return False
        elif one != two:
            return False
    return True


def config_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The default values of entries that a config.json lacks, from its class, as JSON; empty if its library has no such
    class.

    Needs diffusers and transformers.
    """
    import importlib
    import inspect

    known: dict[str, Any] = {}
    transformers = importlib.import_module("transformers")
    made = getattr(importlib.import_module("diffusers"), str(config.get("_class_name")), None)
    if made is not None:
        found = {name: each.default for name, each in inspect.signature(made.__init__).parameters.items()}
        known = {name: value for name, value in found.items() if value is not inspect.Parameter.empty}
    elif config.get("model_type") in transformers.CONFIG_MAPPING:
        known = transformers.CONFIG_MAPPING[config["model_type"]]().to_dict()
    defaults: dict[str, Any] = json.loads(json.dumps(known, default=str))
    return defaults
