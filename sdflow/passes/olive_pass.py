"""Any pass of olive-ai that makes one ONNX model of another, as a pass of a chain.

Its options are checked against the snapshot `olive_options.json`, which benchmarks/providers/olive_options.py writes; olive
itself is imported only in the worker. Of each pass the snapshot has its module, a line of description, what kinds of model it
takes and gives, whether it needs calibration data, the distributions that it needs beside olive-ai's own, and, where it makes
ONNX of ONNX, its options: type, default, description.
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
"""Options of nearly every pass that say how the model is stored: here that is the same for all (`sdflow.onnx_model.files`)."""

UNFIT = {
    "AddOliveMetadata": "it writes metadata, which artifacts do not keep",
    "EPContextBinaryGenerator": "its result fits one device and driver only",
    "ExtractAdapters": "it writes files beside the model, which an artifact does not keep",
    "ModelBuilder": "it builds language models",
    "OnnxDiscrepancyCheck": "it measures and changes nothing; see `sdflow verify`",
    "OrtSessionParamsTuning": "it gives session options, not a model",
    "VitisAIAddMetaData": "it writes metadata, which artifacts do not keep",
    "VitisGenerateModelLLM": "it needs AMD's model_generate package",
    "VitisGenerateModelSD": "it needs AMD's model_generate package",
}
"""Passes that take and give ONNX and are of no use in a chain."""

PARTLY_OPTIONAL = {"OnnxPeepholeOptimizer"}
"""Olive names dependencies of these that they only use when they are there."""


class OlivePassConfig(PassConfig):
    """Base of the options of Olive's passes."""

    model_config = ConfigDict(protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _storage_is_decided(cls, values: Any) -> Any:
        decided = sorted(set(STORAGE) & set(values)) if isinstance(values, Mapping) else []
        if decided:
            raise ValueError(f"{', '.join(decided)}: leave it out, every artifact is stored in the same way")
        return values


class OlivePass(Pass[OlivePassConfig]):
    """Base of the classes that `olive_pass` makes."""

    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("olive-ai", "onnxruntime", "onnx", "onnx-ir", "onnxscript", "numpy")
    imports = EDITS_GRAPH

    def run(self, inputs: PassInputs, out: Path, config: OlivePassConfig) -> Facts:
        source = self.source(inputs)
        # Olive fills in defaults that depend on other options, when they are not given.
        options = {name: value for name, value in config.model_dump().items() if value is not None}
        run_olive_pass(self.name, options, source, out)
        return graph_facts(out / MODEL_FILE)


class Unusable(LookupError):
    """Olive has such a pass, but it cannot be part of a chain; `str()` is the reason."""


def olive_names() -> list[str]:
    """Names of Olive's passes that can be part of a chain with sdflow's own dependencies."""
    passes = _snapshot()["passes"]
    return [name for name in passes if _reason_against(name) is None and not _requires(name)]


def olive_pass(name: str) -> type[OlivePass]:
    """The pass class for Olive's pass `name`, in Olive's spelling.

    Raises KeyError when Olive has no such pass, and Unusable when it cannot work here.
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
    """What to tell the user when olive-ai is missing or of another version than the options that were checked."""
    installed = installed_version("olive-ai")
    if installed is None:
        return "olive-ai is not installed: its passes cannot run"
    if installed == _snapshot()["version"]:
        return None
    return (
        f"olive-ai {installed} is installed, the options known are those of {_snapshot()['version']}: "
        "options of Olive's passes are checked when they run"
    )


@cache
def _snapshot() -> dict[str, Any]:
    return dict(json.loads(OPTIONS_FILE.read_text(encoding="utf-8")))


@cache
def _make(name: str, description: str) -> type[OlivePass]:
    config = _unchecked_config(name) if snapshot_note() else _checked_config(name)
    return type(name, (OlivePass,), {"name": name, "Config": config, "__doc__": description or _words(name)})


def _words(name: str) -> str:
    """The name in words, for the passes that Olive does not describe."""
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
    """The type that pydantic checks for a JSON Schema of the snapshot."""
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
        return f"it takes {' or '.join(known['takes']) or 'something else'} models, a chain hands it ONNX"
    if "onnx" not in known["gives"]:
        return f"it gives {' or '.join(known['gives'])}, not one ONNX model"
    if known["needs_data"]:
        return "it needs a calibration data set"
    external = [option for option, it in known["options"].items() if it.get("required") and it.get("external")]
    if external:
        return f"its option {external[0]} names a file, whose content would not be part of the cache's key"
    return None


def _requires(name: str) -> list[str]:
    """Distributions that the pass needs and that neither olive-ai nor sdflow bring along."""
    ours = {"onnxscript", "psutil", "numpy"}
    names = [re.split(r"[\[<>=!~ ]", need)[0] for need in _snapshot()["passes"][name]["requires"]]
    return [] if name in PARTLY_OPTIONAL else [need for need in names if need not in ours]
