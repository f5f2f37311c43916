"""Our operators for diffusion transformers, in a graph for fixed sizes: what lies between two products, in one pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sdflow.onnx_model.nodes import copied, in_order
from sdflow.runtime.kernels.activations import activation_operators
from sdflow.runtime.kernels.float8_between import with_float8_results
from sdflow.runtime.kernels.graph_index import GraphIndex, Known
from sdflow.runtime.kernels.parts import PART_OF
from sdflow.runtime.kernels.residuals import Fused, residual_operators


def with_transformer_kernels(model: Any, known: Known, without: Collection[str] = ()) -> Any | None:
    """A copy of a ModelProto with our operators in the place of residual sums, norms, modulations and activations, in
    float16 and bfloat16; None where there are none. Whoever calls adds our domain to its opsets.

    model: with all shapes known, as `specialize` leaves it. known: values -> their types and shapes. without: names of parts
    (`sdflow.runtime.kernels.parts`) that cannot be used.
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
    nodes = _read(nodes, results)
    nodes, constants = _without_unread_parts(nodes, index, results)
    nodes = with_float8_results(nodes, known, results)
    values = {name for node in nodes for name in node.output}
    read = {name for node in nodes for name in node.input} | set(results)
    kept = [copied(item) for item in graph.value_info if item.name in values]
    tensors = [copied(tensor) for tensor in graph.initializer if tensor.name in read]
    del graph.node[:], graph.value_info[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.value_info.extend(kept)
    graph.initializer.extend([*tensors, *constants])
    return result


def _apart(found: Iterable[Fused]) -> list[Fused]:
    """Without those that stand for a node that one before them stands for."""
    taken: set[int] = set()
    chosen = []
    for each in found:
        if taken.isdisjoint(each.places):
            taken.update(each.places)
            chosen.append(each)
    return chosen


def _with(nodes: Iterable[Any], found: list[Fused]) -> list[Any]:
    """Copies of the nodes with ours, each in the place of the last one that it stands for."""
    gone = {place for each in found for place in each.places}
    ours = {max(each.places): each.node for each in found}
    made = []
    for place, node in enumerate(nodes):
        if place in ours:
            made.append(ours[place])
        elif place not in gone:
            made.append(copied(node))
    return in_order(made)


def _read(nodes: list[Any], results: Iterable[str]) -> list[Any]:
    """The nodes that the results come from."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            kept.append(node)
    return kept[::-1]


def _without_unread_parts(nodes: list[Any], index: GraphIndex, results: Iterable[str]) -> tuple[list[Any], list[Any]]:
    """Slices in the place of each Split of which less than a half is read, and their constants."""
    import numpy as np
    from onnx import helper, numpy_helper

    read = {name for node in nodes for name in node.input} | set(results)
    made, constants = [], []
    for node in nodes:
        parts = [index.shape(name) for name in node.output]
        axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
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
