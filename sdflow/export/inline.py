"""A model as a part of a larger graph: its names get a prefix, its inputs and outputs are cast at the border."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.errors import UsageError
from sdflow.export.builder import Builder
from sdflow.onnx_model.nodes import copied, in_order


@dataclass(frozen=True)
class Inlined:
    """Nodes in order, and the initializers that they read. outputs: of the model, by its own names -> in the larger graph."""

    nodes: list[Any]
    initializers: list[Any]
    outputs: Mapping[str, str]


def inlined(
    model: Any, name: str, given: Mapping[str, str], wanted: Iterable[str] | None = None, *, widened: bool = True
) -> Inlined:
    """A ModelProto as nodes. name: the prefix of all its names. given: its inputs -> what they read, of any type that can be
    cast; what has the input's own name behind the prefix is read as it is. wanted: the outputs; what only others need is left
    out. None: all. widened: outputs of a floating-point type are given as float32.

    Raises UsageError for a model with other inputs.
    """
    from onnx import TensorProto
    from onnx.compose import add_prefix_graph

    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    graph = model.graph
    names = {tensor.name for tensor in graph.initializer}
    inputs = {item.name: item.type.tensor_type.elem_type for item in graph.input if item.name not in names}
    if inputs.keys() - given.keys():
        raise UsageError(
            f"the graph takes {', '.join(inputs)}, and only {', '.join(given)} are known",
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
        if widened and outputs[port] in floats:
            made[port] = behind.cast(prefix + port, TensorProto.FLOAT)
    nodes = needed([*border.nodes, *in_order(graph.node), *behind.nodes], made.values())
    read = read_by(nodes)
    return Inlined(nodes, [tensor for tensor in graph.initializer if tensor.name in read], made)


def needed(nodes: Sequence[Any], results: Iterable[str]) -> list[Any]:
    """The nodes, in their order, that these results depend on."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(read_by([node]))
            kept.append(node)
    return kept[::-1]


def read_by(nodes: Iterable[Any]) -> set[str]:
    """The names of all values that nodes read, also within the graphs in their attributes."""
    found: set[str] = set()
    for node in nodes:
        found.update(name for name in node.input if name)
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found |= read_by(graph.node) | {item.name for item in graph.output}
    return found


def parted(
    part: Inlined, moving: Iterable[str], steady: Iterable[str]
) -> tuple[tuple[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """The nodes that run once, in front of a loop, and those of its body; each with the initializers that it reads.

    What depends on none of `moving`, which change from round to round, but on `steady`, runs once. Constants stay with who reads
    them: in the body ONNX Runtime folds them; those that both read are there twice."""
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
    before_tensors = [each for each in outer_tensors if each.name in outer_read]
    return (outer, before_tensors), (inner, [each for each in part.initializers if each.name in inner_read])


def _renaming(names: Mapping[str, str]) -> Callable[[Any], Any]:
    def rename(node: Any) -> Any:
        node = copied(node)
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        return node

    return rename
