"""Fuse what lies between two products of a diffusion transformer into sdflow's operators, in a graph of fixed sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.nodes import attribute, copied, in_order, needed, refill
from sdflow.runtime.kernels.activations import activation_operators
from sdflow.runtime.kernels.graph_index import GraphIndex, Known
from sdflow.runtime.kernels.parts import PART_OF
from sdflow.runtime.kernels.residuals import Fused, residual_operators
from sdflow.runtime.kernels.transformer_definitions import BFLOAT16


def with_transformer_kernels(model: Any, known: Known, without: Collection[str] = ()) -> Any | None:
    """Return a copy of a ModelProto with fused residual sums, norms, modulations and activations in float16 and
    bfloat16, or None if there are none. The caller adds sdflow's domain to its opsets.

    model: with all shapes known, as from `specialize`. known: values -> types and shapes. without: unusable parts
    (`sdflow.runtime.kernels.parts`).
    """
    import onnx

    index = GraphIndex(model.graph, known)
    found = [*residual_operators(index), *activation_operators(index)]
    found = _apart(each for each in found if PART_OF[each.node.op_type] not in without)
    if not found:
        return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    nodes = _with(graph.node, found)
    results = [item.name for item in graph.output]
    nodes = needed(nodes, results)
    nodes, constants = _without_unread_parts(nodes, index, results)
    nodes = with_float8_results(nodes, known, results)
    values = {name for node in nodes for name in node.output}
    read = {name for node in nodes for name in node.input} | set(results)
    refill(graph.node, nodes)
    refill(graph.value_info, (item for item in graph.value_info if item.name in values))
    refill(graph.initializer, [*(tensor for tensor in graph.initializer if tensor.name in read), *constants])
    return result


def _apart(found: Iterable[Fused]) -> list[Fused]:
    """Drop replacements that overlap an earlier one."""
    taken: set[int] = set()
    chosen = []
    for each in found:
        if taken.isdisjoint(each.places):
            taken.update(each.places)
            chosen.append(each)
    return chosen


def _with(nodes: Iterable[Any], found: list[Fused]) -> list[Any]:
    """Return copies of the nodes with the replacements inserted, each in place of its last node."""
    gone = {place for each in found for place in each.places}
    ours = {max(each.places): each.node for each in found}
    made = []
    for place, node in enumerate(nodes):
        if place in ours:
            made.append(ours[place])
        elif place not in gone:
            made.append(copied(node))
    return in_order(made)


def _without_unread_parts(nodes: list[Any], index: GraphIndex, results: Iterable[str]) -> tuple[list[Any], list[Any]]:
    """Replace each Split of which less than half is read by Slices; return the nodes and new constants."""
    import numpy as np
    from onnx import helper, numpy_helper

    read = {name for node in nodes for name in node.input} | set(results)
    made, constants = [], []
    for node in nodes:
        parts = [index.shape(name) for name in node.output]
        axis = attribute(node, "axis", 0)
        if node.op_type != "Split" or node.domain or not all(parts):
            made.append(node)
            continue
        sizes = [part[axis] for part in parts]
        if 2 * sum(size for name, size in zip(node.output, sizes, strict=True) if name in read) >= sum(sizes):
            made.append(node)
            continue
        for number, (name, size) in enumerate(zip(node.output, sizes, strict=True)):
            if name not in read:
                continue
            first = sum(sizes[:number])
            bounds = {"starts": first, "ends": first + size, "axes": axis}
            constants += [
                numpy_helper.from_array(np.array([value]), f"{name}/{what}") for what, value in bounds.items()
            ]
            made.append(
                helper.make_node(
                    "Slice", [node.input[0], *(f"{name}/{what}" for what in bounds)], [name], f"{name}/Slice"
                )
            )
    return made, constants


NORMS, ACTIVATIONS = ("ModulatedNorm", "GatedResidualNorm"), ("SiluGated", "TanhGelu")
WIDEST_ACTIVATION = 16384
"""Maximum row width: ACTIVATION_ROW_THREADS with ACTIVATION_HELD vectors each."""


def with_float8_results(nodes: Sequence[Any], known: Known, results: Collection[str]) -> list[Any]:
    """Fuse Float8Rows into the norm or activation whose output only it reads. known: values -> types and shapes.
    results: the graph's outputs."""
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def rows(value: str) -> Any | None:
        """Return the Float8Rows that is a value's only reader, or None."""
        found = readers.get(value, [])
        if len(found) != 1 or value in results or _kind(found[0]) != "Float8Rows":
            return None
        return (
            None if any(each.name == "tokens" and each.i for each in found[0].attribute) else found[0]
        )  # takes all rows

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
    """Return sdflow's operator name without the type suffix; "" for other operators."""
    return str(node.op_type.removesuffix(BFLOAT16)) if node.domain == DOMAIN else ""


def _joined(node: Any, kind: str, rows: Sequence[Any]) -> Any:
    """Return a norm or activation that outputs float8 rows."""
    joined = copied(node)
    joined.op_type = f"Float8{node.op_type}"
    first, *others = (list(each.output) for each in rows)
    kept = list(node.output[1:2]) if kind == "GatedResidualNorm" else []
    joined.output[:] = [*first, *kept, *(name for other in others for name in other)]
    return joined
