"""Whether two config.json say the same: releases of diffusers and transformers write more or fewer of the entries that have
their default values.

What a default is, the libraries know, and a machine that lacks them has to be told (`config_defaults`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdflow.sources.checkpoint import ORIGIN_KEYS

_OF_WEIGHTS = frozenset({"torch_dtype", "dtype"})
"""What type the weights had: it is seen in the files, and a graph has its own."""
_ABSENT = object()


def same_architecture(config: Mapping[str, Any], other: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether both make the same module. defaults: of the entries that one of them may lack."""
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
    """The entries that the config's class has where its config.json has none, as JSON; none where its library has no such class.

    Wants diffusers and transformers.
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
