"""olive-ai's ONNX-to-ONNX passes as passes of a chain.

Options are checked against the snapshot `olive_options.json`, written by benchmarks/providers/olive_options.py; olive
itself is imported only in the worker. For each pass, the snapshot has its module, a one-line description, its input and
output model types, whether it needs calibration data, its dependencies besides olive-ai's own, and, for ONNX-to-ONNX
passes, its options (type, default, description).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Union

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, create_model, model_validator

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.machine.packages import installed_version
from sdflow.onnx_model.facts import graph_facts
from sdflow.passes.base import EDITS_GRAPH, Pass, PassConfig, PassInputs
from sdflow.passes.olive import run_olive_pass

OPTIONS_FILE = Path(__file__).with_name("olive_options.json")

STORAGE = (
    "save_as_external_data",
    "all_tensors_to_one_file",
    "external_data_name",
    "size_threshold",
    "convert_attribute",
)
"""Storage options of most Olive passes. sdflow stores all models the same way (`sdflow.onnx_model.files`)."""

UNFIT = {
    "AddOliveMetadata": "it writes metadata, which artifacts do not keep",
    "EPContextBinaryGenerator": "its result only runs on one device and driver",
    "ExtractAdapters": "it writes additional files, which artifacts do not keep",
    "ModelBuilder": "it builds language models",
    "OnnxDiscrepancyCheck": "it measures and changes nothing; see `sdflow verify`",
    "OrtSessionParamsTuning": "it produces session options, not a model",
    "VitisAIAddMetaData": "it writes metadata, which artifacts do not keep",
    "VitisGenerateModelLLM": "it needs AMD's model_generate package",
    "VitisGenerateModelSD": "it needs AMD's model_generate package",
}
"""ONNX-to-ONNX passes that are useless in a chain, with the reason."""

PARTLY_OPTIONAL = {"OnnxPeepholeOptimizer"}
"""Passes whose declared dependencies are optional in Olive."""


class OlivePassConfig(PassConfig):
    """Base class of the options of Olive passes."""

    model_config = ConfigDict(protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _storage_is_decided(cls, values: Any) -> Any:
        decided = sorted(set(STORAGE) & set(values)) if isinstance(values, Mapping) else []
        if decided:
            raise ValueError(f"{', '.join(decided)}: remove it, all artifacts are stored the same way")
        return values


class OlivePass(Pass[OlivePassConfig]):
    """Base class of the classes that `olive_pass` creates."""

    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("olive-ai", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy")
    imports = EDITS_GRAPH

    def run(self, inputs: PassInputs, out: Path, config: OlivePassConfig) -> Facts:
        source = self.source(inputs)
        # Unset options stay unset: Olive derives some defaults from other options.
        options = {name: value for name, value in config.model_dump().items() if value is not None}
        run_olive_pass(self.name, options, source, out)
        return graph_facts(out / MODEL_FILE)


class Unusable(LookupError):
    """Olive has the pass, but a chain cannot use it; `str()` is the reason."""


def olive_names() -> list[str]:
    """Return the names of Olive's passes that work in a chain with only sdflow's own dependencies."""
    passes = _snapshot()["passes"]
    return [name for name in passes if _reason_against(name) is None and not _requires(name)]


def olive_pass(name: str) -> type[OlivePass]:
    """Return the pass class for Olive's pass `name`, in Olive's spelling.

    Raises KeyError if Olive has no such pass, and Unusable if it cannot work in a chain.
    """
    known = _snapshot()["passes"][name]
    reason = _reason_against(name)
    missing = [need for need in _requires(name) if installed_version(need) is None]
    if reason is None and missing:
        reason = f"it needs {', '.join(missing)}, which is not installed"
    if reason is not None:
        raise Unusable(f"Olive's {name} cannot be used in a chain: {reason}")
    return _make(name, str(known["description"]))


def snapshot_note() -> str | None:
    """Return a note for the user if olive-ai is missing or differs from the snapshot's version, otherwise None."""
    installed = installed_version("olive-ai")
    if installed is None:
        return "olive-ai is not installed: its passes cannot run"
    if installed == _snapshot()["version"]:
        return None
    return (
        f"olive-ai {installed} is installed, but sdflow knows the options of {_snapshot()['version']}: "
        "options of Olive's passes are only checked when they run"
    )


@cache
def _snapshot() -> dict[str, Any]:
    return dict(json.loads(OPTIONS_FILE.read_text(encoding="utf-8")))


@cache
def _make(name: str, description: str) -> type[OlivePass]:
    config = _unchecked_config(name) if snapshot_note() else _checked_config(name)
    return type(name, (OlivePass,), {"name": name, "Config": config, "__doc__": description or _words(name)})


def _words(name: str) -> str:
    """Return the name as words, for passes without a description in Olive."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).capitalize()


def _checked_config(name: str) -> type[OlivePassConfig]:
    fields: dict[str, Any] = {}
    for option, described in _snapshot()["passes"][name]["options"].items():
        if described.get("external"):
            continue
        kind = _python_type(described["type"])
        if described.get("required"):
            fields[option] = (kind, Field(description=described["description"]))
        else:
            fields[option] = (kind | None, Field(described.get("default"), description=described["description"]))
    return create_model(f"{name}Config", __base__=OlivePassConfig, **fields)


def _unchecked_config(name: str) -> type[OlivePassConfig]:
    class AnyOptions(OlivePassConfig):
        model_config = ConfigDict(extra="allow")

    AnyOptions.__name__ = f"{name}Config"
    return AnyOptions


def _python_type(schema: Mapping[str, Any]) -> Any:
    """Return the type that pydantic validates for a JSON Schema of the snapshot."""
    plain = {"boolean": StrictBool, "integer": StrictInt, "number": StrictFloat, "string": StrictStr, "null": None}
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if "anyOf" in schema:
        return Union[tuple(_python_type(choice) for choice in schema["anyOf"])]  # noqa: UP007  made at run time
    match schema.get("type"):
        case "array":
            return list[_python_type(schema.get("items", {}))]  # type: ignore[misc]
        case "object":
            return dict[str, _python_type(schema.get("additionalProperties", {}))]  # type: ignore[misc]
        case None:
            return Any
        case kind:
            return plain[kind]


def _reason_against(name: str) -> str | None:
    known = _snapshot()["passes"][name]
    if name in UNFIT:
        return UNFIT[name]
    if "onnx" not in known["takes"]:
        return f"it takes {' or '.join(known['takes']) or 'something else'} models, but chains pass ONNX"
    if "onnx" not in known["gives"]:
        return f"it produces {' or '.join(known['gives'])}, not one ONNX model"
    if known["needs_data"]:
        return "it needs a calibration data set"
    external = [option for option, it in known["options"].items() if it.get("required") and it.get("external")]
    if external:
        return f"its option {external[0]} names a file whose content would not be part of the cache key"
    return None


def _requires(name: str) -> list[str]:
    """Return the distributions that the pass needs and neither olive-ai nor sdflow installs."""
    ours = {"onnxscript", "psutil", "numpy"}
    names = [re.split(r"[\[<>=!~ ]", need)[0] for need in _snapshot()["passes"][name]["requires"]]
    return [] if name in PARTLY_OPTIONAL else [need for need in names if need not in ours]
