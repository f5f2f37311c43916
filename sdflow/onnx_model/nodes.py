"""Read, copy, sort and replace nodes of an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sdflow.errors import PassError


def copied(message: Any) -> Any:
    """Return a copy of a protobuf message without a parent."""
    return type(message).FromString(message.SerializeToString())


def refill(field: Any, messages: Iterable[Any]) -> None:
    """Replace all messages of a repeated field by copies of these, some of which may be its own."""
    copies = [copied(message) for message in messages]
    del field[:]
    field.extend(copies)


def import_domain(model: Any, domain: str) -> None:
    """Add version 1 of a domain's operators to those that a ModelProto uses."""
    if domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=domain, version=1)


def prune(graph: Any) -> None:
    """Sort a graph's nodes and remove those that no output depends on, with their initializers and value infos."""
    outputs = {item.name for item in graph.output}
    nodes = needed(in_order(graph.node), outputs)
    live = outputs | read_by(nodes) | {name for node in nodes for name in node.output}
    refill(graph.node, nodes)
    for field in (graph.initializer, graph.value_info):
        refill(field, (item for item in field if item.name in live))


def needed(nodes: Sequence[Any], results: Iterable[str]) -> list[Any]:
    """Return the nodes, in their order, that these results depend on."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(read_by([node]))
            kept.append(node)
    return kept[::-1]


def read_by(nodes: Iterable[Any]) -> set[str]:
    """Return the names of all values that nodes read, including graphs in their attributes."""
    found: set[str] = set()
    for node in nodes:
        found.update(name for name in node.input if name)
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found |= read_by(graph.node) | {item.name for item in graph.output}
    return found


def attributes(node: Any) -> dict[str, Any]:
    """Return a node's attributes, by name."""
    from onnx import helper

    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def attribute(node: Any, name: str, otherwise: Any) -> Any:
    """Return a node's attribute, or `otherwise` if it has none of this name."""
    from onnx import helper

    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), otherwise)


def first_output(node: Any) -> str:
    """Return the first output that a node names."""
    return next(str(name) for name in node.output if name)


def in_order(nodes: Sequence[Any]) -> list[Any]:
    """Sort nodes topologically, otherwise keeping their order. Some tools write unsorted graphs.

    Raises PassError for cycles."""
    place = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    done: dict[int, Any] = {}
    begun: set[int] = set()
    for start in range(len(nodes)):
        waiting = [start]
        while waiting:
            index = waiting[-1]
            before = [place[name] for name in nodes[index].input if name in place and place[name] not in done]
            if before and index in begun:
                raise PassError(
                    f"its nodes form a cycle that includes {nodes[index].name!r:.60}",
                    remedy="The graph is damaged: rebuild the pipeline with sdflow run.",
                )
            begun.add(index)
            waiting += before
            if not before:
                done[waiting.pop()] = nodes[index]
    return list(done.values())
