"""Inline a model into a larger graph: its names get a prefix, its inputs and outputs are cast at the border."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.errors import UsageError
from sdflow.export.builder import Builder
from sdflow.onnx_model.nodes import copied, in_order, needed, read_by


@dataclass(frozen=True)
class Inlined:
    """Nodes in order, and the initializers that they read. outputs: the model's names -> names in the larger graph."""

    nodes: list[Any]
    initializers: list[Any]
    outputs: Mapping[str, str]


def inlined(
    model: Any, name: str, given: Mapping[str, str], wanted: Iterable[str] | None = None, *, widened: bool = True
) -> Inlined:
    """Turn a ModelProto into nodes. name: prefix of all its names. given: its inputs -> values to read, of any castable
    type; a value with the input's own name after the prefix is read without a cast. wanted: outputs, without nodes that
    only others need; None: all. widened: cast floating-point outputs to float32.

    Raises UsageError if the model has other inputs.
    """
    from onnx.compose import add_prefix_graph

    graph = model.graph
    names = {tensor.name for tensor in graph.initializer}
    inputs = {item.name: item.type.tensor_type.elem_type for item in graph.input if item.name not in names}
    if inputs.keys() - given.keys():
        raise UsageError(
            f"the graph takes {', '.join(inputs)}, but only {', '.join(given)} are known",
            where=name,
            remedy="The graph and its config.json belong to different models: build the pipeline again, sdflow run.",
        )
    outputs = {item.name: item.type.tensor_type.elem_type for item in graph.output}
    chosen = tuple(outputs if wanted is None else wanted)
    prefix = f"{name}/"
    graph = add_prefix_graph(graph, prefix)
    border = Builder(f"{name}/border")
    for port, element in inputs.items():
        if given[port] != prefix + port:
            border.cast(given[port], element, to=prefix + port)
    behind = Builder(f"{name}/behind")
    made = {port: prefix + port for port in chosen}
    for port in chosen:
        if widened and _is_float(outputs[port]):
            made[port] = behind.cast(prefix + port, _float32())
    nodes = needed([*border.nodes, *in_order(graph.node), *behind.nodes], made.values())
    read = read_by(nodes)
    return Inlined(nodes, [tensor for tensor in graph.initializer if tensor.name in read], made)


@dataclass(frozen=True)
class Parted:
    """Nodes that run once before a loop, and those of its body, each with its initializers."""

    before: list[Any]
    before_initializers: list[Any]
    body: list[Any]
    body_initializers: list[Any]


def parted(part: Inlined, moving: Iterable[str], steady: Iterable[str]) -> Parted:
    """Separate nodes that run once, because they depend only on `steady`, from those that depend on `moving`, which
    changes each round. Constants stay with their readers: ONNX Runtime folds them in the body; shared ones are
    duplicated."""
    changes, once = set(moving), set(steady)
    body, before, constants = [], [], []
    for node in part.nodes:
        read = read_by([node])
        if read & changes:
            changes.update(node.output)
            body.append(node)
        elif read & once:
            once.update(node.output)
            before.append(node)
        else:
            constants.append(node)
    inner = needed([*constants, *body], {name for node in body for name in node.output})
    outer = needed([*constants, *before], {name for node in before for name in node.output})
    inner_names = {name for node in inner for name in node.output} | read_by(inner)
    made = {name for node in constants for name in node.output} | {tensor.name for tensor in part.initializers}
    twice = made & inner_names & read_by(outer)
    renamed = _renaming({name: f"{name}/once" for name in twice})
    outer = [renamed(node) for node in outer]
    outer_tensors = [copied(each) for each in part.initializers]
    for tensor in outer_tensors:
        tensor.name = f"{tensor.name}/once" if tensor.name in twice else tensor.name
    outer_read, inner_read = read_by(outer), read_by(inner)
    return Parted(
        outer,
        [each for each in outer_tensors if each.name in outer_read],
        inner,
        [each for each in part.initializers if each.name in inner_read],
    )


def _renaming(names: Mapping[str, str]) -> Callable[[Any], Any]:
    def rename(node: Any) -> Any:
        node = copied(node)
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        return node

    return rename


def _float32() -> int:
    from onnx import TensorProto

    return int(TensorProto.FLOAT)


def _is_float(element: int) -> bool:
    from onnx import TensorProto

    return element in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
