"""Nodes of an ONNX graph: copies of them, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdflow.errors import PassError


def copied(message: Any) -> Any:
    """A copy of a protobuf message that belongs to no other."""
    return type(message).FromString(message.SerializeToString())


def in_order(nodes: Sequence[Any]) -> list[Any]:
    """Nodes behind those that make what they read, otherwise in their order. Some tools leave graphs out of order.

    Raises PassError for nodes that read one another in a circle."""
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
                    f"its nodes read one another in a circle, {nodes[index].name!r:.60} among them",
                    remedy="The graph is damaged: build the pipeline again, sdflow run.",
                )
            begun.add(index)
            waiting += before
            if not before:
                done[waiting.pop()] = nodes[index]
    return list(done.values())
