"""Write the options of every olive-ai pass to `sdflow/passes/olive_options.json`, from the installed olive-ai.

    python benchmarks/providers/olive_options.py

Workflows can then be checked without importing olive (6 s). A test verifies that both are equal. Types are JSON Schema.
An option that is a path, a function or a data set is marked `external`, because its content would not be part of a
step's key.
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.passes.olive_pass import OPTIONS_FILE, STORAGE


def installed_options() -> dict[str, Any]:
    """The same, from the installed olive-ai. Slow: imports olive and every pass."""
    from sdflow.passes.olive import require_silence

    require_silence()
    from olive import __version__
    from olive.package_config import OlivePackageConfig

    package = OlivePackageConfig.load_default_config()
    described = {}
    for key, module in package.passes.items():
        pass_class = package.import_pass_module(key)
        described[pass_class.__name__] = _describe(pass_class, module, package.extra_dependencies)
    return {"version": __version__, "passes": dict(sorted(described.items()))}


def write_options(path: Path = OPTIONS_FILE) -> None:
    """Write the snapshot of the installed olive-ai."""
    path.write_text(json.dumps(installed_options(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _describe(pass_class: Any, module: Any, extras: dict[str, list[str]]) -> dict[str, Any]:
    from olive.hardware import DEFAULT_CPU_ACCELERATOR

    hints = pass_class._run_for_config.__annotations__
    requires = {name for extra in module.extra_dependencies for name in extras.get(extra, [extra])}
    takes, gives = _handlers(hints.get("model")), _handlers(hints.get("return"))
    options = pass_class.default_config(DEFAULT_CPU_ACCELERATOR) if "onnx" in takes and "onnx" in gives else {}
    return {
        "module": pass_class.__module__,
        "description": (pass_class.__doc__ or "").strip().split("\n")[0],
        "takes": takes,
        "gives": gives,
        "needs_data": module.dataset == "dataset_required",
        "requires": sorted(requires | set(module.module_dependencies)),
        "options": {name: _option(name, parameter) for name, parameter in options.items() if name not in STORAGE},
    }


def _handlers(annotation: object) -> list[str]:
    """["onnx", "pytorch"] for Union[ONNXModelHandler, PyTorchModelHandler], which some modules write as a string."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return sorted({name.lower() for name in re.findall(r"(\w+?)ModelHandler", text)})


def _option(name: str, parameter: Any) -> dict[str, Any]:
    described: dict[str, Any] = {
        "type": _json_schema(parameter.type_),
        "description": " ".join((parameter.description or "").split()),
    }
    if parameter.required:
        described["required"] = True
    elif (default := _plain(parameter.default_value)) is not None:
        described["default"] = default
    if parameter.category.value != "none" or name.endswith("data_config"):
        described["external"] = True
    return described


def _plain(value: Any) -> Any:
    """A default as JSON; None for one that depends on other options, which Olive then fills in itself."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None


def _json_schema(annotation: Any) -> dict[str, Any]:
    """JSON Schema of a type annotation; {} for what cannot be said in YAML or is not told."""
    plain = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    if annotation in plain:
        return {"type": plain[annotation]}
    if annotation is Path:
        return {"type": "string"}
    if annotation is type(None):
        return {"type": "null"}
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {"enum": [member.value for member in annotation]}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return {"type": "array", "items": _json_schema(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _json_schema(arguments[1])}
    if origin in (typing.Union, types.UnionType):
        choices = [_json_schema(argument) for argument in arguments if _in_yaml(argument)]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    return {}


def _in_yaml(annotation: Any) -> bool:
    """Whether a member of a union can be written in YAML: functions and Olive's own objects cannot."""
    known = (bool, int, float, str, list, dict, Path, type(None))
    return (
        annotation in known
        or typing.get_origin(annotation) in (list, dict)
        or (isinstance(annotation, type) and issubclass(annotation, Enum))
    )


if __name__ == "__main__":
    write_options()
