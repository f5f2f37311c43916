"""Tables of the operators that each execution provider has a kernel for: one JSON file per provider, and their reader.

`kernels` maps an operator ("Conv", "com.microsoft.BiasAdd") to rows [first version, last version, {constraint: "type
type ..."}]. Versions are the operator's in its domain: a number; a list, for one row per number; null, for ONNX
Runtime's open end, which covers only the first version; "any", for a provider that ignores versions. A constraint is a
type parameter or a formal parameter of the operator's schema, the index of an input, or "*" for every input and output;
types may be abbreviated by a name in `types`. Operators in `unknown` are in the source but not in this table; all
others have no kernel. `opset` and `ir_version` are the highest that the version loads. conditions.json holds
requirements beyond types. benchmarks/providers/kernel_tables.py writes the tables, each from its provider's own binary
or document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sdflow.errors import VerificationError
from sdflow.verify.finding import Level

_FOLDER = Path(__file__).parent
_FILES = {
    "CPUExecutionProvider": "cpu.json",
    "CUDAExecutionProvider": "cuda.json",
    "ROCMExecutionProvider": "rocm.json",
    "MIGraphXExecutionProvider": "migraphx.json",
    "DmlExecutionProvider": "directml.json",
    "TensorrtExecutionProvider": "tensorrt.json",
    "NvTensorRTRTXExecutionProvider": "nv_tensorrt_rtx.json",
    "OpenVINOExecutionProvider": "openvino.json",
    "QNNExecutionProvider": "qnn.json",
    "VitisAIExecutionProvider": "vitisai.json",
    "WebGpuExecutionProvider": "webgpu.json",
}
_ANY = 1 << 30


@dataclass(frozen=True)
class Kernel:
    """A kernel of one operator. last: None if it covers only version `first`. types: constraint -> ONNX types."""

    first: int
    last: int | None
    types: Mapping[str, frozenset[str]]

    def takes_version(self, version: int) -> bool:
        """Whether it supports an operator introduced in `version` of its domain.

        Like KernelRegistry::VerifyKernelDef in ONNX Runtime's core/framework/kernel_registry.cc.
        """
        return self.first == version or (self.last is not None and self.first < version <= self.last)


@dataclass(frozen=True)
class Condition:
    """A kernel's requirement on a node beyond types; exactly one test below is set.

    input: index of the tested input; its last dimension must be in `last_dimension`, or, divided by the attribute
    `last_dimension_per`, be a multiple of `multiple_of`; its type must be in `types`; its number of dimensions must be
    `rank`; with `present` it must be given.
    given: index of an input without which the condition does not apply.
    attribute: must be one of `values`; `default` if it is not set.
    reason, remedy: for the user, after the operator's name; `{found}` is the node's value. source: the reference.
    """

    operators: frozenset[str]
    providers: frozenset[str]
    reason: str
    remedy: str
    source: str
    level: Level = "error"
    given: int | None = None
    input: int | None = None
    last_dimension: tuple[int, ...] = ()
    last_dimension_per: str | None = None
    multiple_of: int = 1
    types: tuple[str, ...] = ()
    rank: int | None = None
    present: bool = False
    attribute: str | None = None
    default: int | str | None = None
    values: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class KernelTable:
    """The kernels of a provider. kernels: operator, as "domain.name" or a standard operator's name -> its kernels."""

    provider: str
    version: str
    source: str
    opset: int
    ir_version: int
    kernels: Mapping[str, tuple[Kernel, ...]]
    unknown: frozenset[str]
    conditions: tuple[Condition, ...]

    @property
    def title(self) -> str:
        """The provider's common name: CUDA, DirectML."""
        return {
            "DmlExecutionProvider": "DirectML",
            "TensorrtExecutionProvider": "TensorRT",
            "NvTensorRTRTXExecutionProvider": "TensorRT for RTX",
            "WebGpuExecutionProvider": "WebGPU",
        }.get(self.provider, self.provider.removesuffix("ExecutionProvider"))


@cache
def kernel_table(provider: str) -> KernelTable:
    """The table of an execution provider. Raises VerificationError if there is none."""
    if provider not in _FILES:
        raise VerificationError(f"there is no table of the kernels of {provider}", where=str(_FOLDER))
    content = json.loads((_FOLDER / _FILES[provider]).read_text(encoding="utf-8"))
    aliases: Mapping[str, str] = content.get("types", {})
    return KernelTable(
        provider=content["provider"],
        version=content["version"],
        source=content["source"],
        opset=content["opset"],
        ir_version=content["ir_version"],
        kernels={
            operator: tuple(kernel for row in rows for kernel in _kernels(row, aliases))
            for operator, rows in content["kernels"].items()
        },
        unknown=frozenset(content.get("unknown", "").split()),
        conditions=tuple(condition for condition in _conditions() if provider in condition.providers),
    )


def _kernels(row: list[Any], aliases: Mapping[str, str]) -> list[Kernel]:
    first, last, constraints = row
    types = {
        key: frozenset(name for word in words.split() for name in aliases.get(word, word).split())
        for key, words in constraints.items()
    }
    firsts = first if isinstance(first, list) else [first]
    return [Kernel(version, _ANY if last == "any" else last, types) for version in firsts]


@cache
def _conditions() -> tuple[Condition, ...]:
    return tuple(_condition(entry) for entry in json.loads((_FOLDER / "conditions.json").read_text(encoding="utf-8")))


def _condition(entry: dict[str, Any]) -> Condition:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    fields |= {key: frozenset(entry[key].split()) for key in ("operators", "providers")}
    return Condition(**fields)
