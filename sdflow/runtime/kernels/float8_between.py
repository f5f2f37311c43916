"""Norms and activations of a transformer that give rows of float8, where products of float8 alone read their results.

Float8Rows(ModulatedNorm(x, ...))         Float8ModulatedNorm(x, ...)
Float8Rows(GatedResidualNorm(x, ...))     Float8GatedResidualNorm(x, ...), whose sum stays as it is
Float8Rows(SiluGated(a, b, ...))          Float8SiluGated(a, b, ...)
Float8Rows(TanhGelu(a, ...))              Float8TanhGelu(a, ...)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.graph_index import Known
from sdflow.runtime.kernels.transformer_definitions import BFLOAT16

NORMS, ACTIVATIONS = ("ModulatedNorm", "GatedResidualNorm"), ("SiluGated", "TanhGelu")
WIDEST_ACTIVATION = 16384
"""Channels of a row: ACTIVATION_ROW_THREADS with ACTIVATION_HELD vectors each."""


def with_float8_results(nodes: Sequence[Any], known: Known, results: Collection[str]) -> list[Any]:
    """The nodes, with those that Float8Rows alone reads in one with it. known: values -> their types and shapes. results: of the
    graph."""
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def rows(value: str) -> Any | None:
        """The Float8Rows that alone reads a value."""
        found = readers.get(value, [])
        if len(found) != 1 or value in results or _kind(found[0]) != "Float8Rows":
            return None
        return None if any(each.name == "tokens" and each.i for each in found[0].attribute) else found[0]  # of all rows

    gone: set[str] = set()
    made = []
    for node in nodes:
        kind = _kind(node)
        values = [name for place, name in enumerate(node.output) if not (kind == "GatedResidualNorm" and place == 1)]
        found = [rows(value) for value in values] if kind in (*NORMS, *ACTIVATIONS) else [None]
        wide = kind in ACTIVATIONS and known.get(values[0], (0, [0]))[1][-1] > WIDEST_ACTIVATION
        if not wide and all(each is not None for each in found):
            made.append(_joined(node, kind, found))
            gone.update(each.name for each in found if each is not None)
        elif node.name not in gone or kind != "Float8Rows":
            made.append(node)
    return made


def _kind(node: Any) -> str:
    """The operator of ours, whatever its type; "" for others."""
    return str(node.op_type.removesuffix(BFLOAT16)) if node.domain == DOMAIN else ""


def _joined(node: Any, kind: str, rows: Sequence[Any]) -> Any:
    """A norm or an activation with the rows of its results."""
    joined = type(node).FromString(node.SerializeToString())
    joined.op_type = f"Float8{node.op_type}"
    first, *others = (list(each.output) for each in rows)
    kept = list(node.output[1:2]) if kind == "GatedResidualNorm" else []
    del joined.output[:]
    joined.output.extend([*first, *kept, *(name for other in others for name in other)])
    return joined
