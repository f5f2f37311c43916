"""A graph for fixed sizes, to look for patterns in: who makes a value, who reads it, of what type and shape it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Known = Mapping[str, tuple[int, list[int]]]
"""Value -> its element type, its shape."""


class GraphIndex:
    """nodes: of the graph, in an order in which none reads what a later one makes; they are known by their places."""

    def __init__(self, graph: Any, known: Known) -> None:
        self.nodes = list(graph.node)
        self._known: Known = {
            **{
                item.name: (
                    item.type.tensor_type.elem_type,
                    [axis.dim_value for axis in item.type.tensor_type.shape.dim],
                )
                for item in graph.output
            },
            **known,
        }
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self._results = {item.name for item in graph.output}
        self._readers: dict[str, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for name in node.input:
                self._readers.setdefault(name, []).append(place)

    def element(self, name: str) -> int:
        """ONNX's type of a value's elements; 0 if it is not known."""
        element, _ = self._known.get(name, (0, []))
        return element

    def shape(self, name: str) -> list[int]:
        """Empty if it is not known."""
        return self._known.get(name, (0, []))[1]

    def readers(self, name: str) -> list[int]:
        """Places, one for each time that a value is read; none for a result of the graph, which others read."""
        return [] if name in self._results else self._readers.get(name, [])

    def only_reader(self, name: str) -> int | None:
        """The place of the one node that reads a value, once."""
        found = self.readers(name)
        return found[0] if len(found) == 1 else None

    def maker(self, name: str, *op_types: str) -> int | None:
        """The place of what makes a value, if it is one of these operators of ONNX."""
        place = self._makers.get(name)
        return place if place is not None and self.is_plain(place, *op_types) else None

    def is_plain(self, place: int, *op_types: str) -> bool:
        """Whether it is one of these operators of ONNX."""
        node = self.nodes[place]
        return node.domain in ("", "ai.onnx") and node.op_type in op_types

    def constant(self, name: str) -> Any | None:
        """The array of an initializer that lies in the graph itself."""
        import onnx

        tensor = self._constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return onnx.numpy_helper.to_array(tensor)

    def attribute(self, place: int, name: str, default: Any) -> Any:
        """Of a node."""
        import onnx

        found = (item for item in self.nodes[place].attribute if item.name == name)
        return next((onnx.helper.get_attribute_value(item) for item in found), default)

    def depends(self, names: Collection[str], on: Collection[int]) -> bool:
        """Whether one of the values is made, directly or not, of what one of the nodes `on` makes."""
        first, seen = min(on), set[int]()
        waiting = [self._makers[name] for name in names if name in self._makers]
        while waiting:
            place = waiting.pop()
            if place in on:
                return True
            if place < first or place in seen:
                continue
            seen.add(place)
            waiting += [self._makers[name] for name in self.nodes[place].input if name in self._makers]
        return False

    def part(self, name: str) -> tuple[str, int]:
        """The value whose last axis this one is a part of, through Slice and Split, and where it begins there."""
        first = 0
        while (found := self._part(name)) is not None:
            name, first = found[0], first + found[1]
        return name, first

    def _part(self, name: str) -> tuple[str, int] | None:
        place = self.maker(name, "Slice", "Split")
        if place is None:
            return None
        node = self.nodes[place]
        whole = self.shape(node.input[0])
        if not whole or self.shape(name)[:-1] != whole[:-1]:
            return None
        if node.op_type == "Split":
            if self.attribute(place, "axis", 0) not in (-1, len(whole) - 1):
                return None
            before = node.output[: list(node.output).index(name)]
            return node.input[0], sum(self.shape(each)[-1] for each in before)
        bounds = [self.constant(each) for each in node.input[1:]]
        if len(bounds) < 3 or any(each is None for each in bounds):
            return None
        starts, _, axes, *steps = (each.tolist() for each in bounds if each is not None)
        if steps and set(steps[0]) != {1}:
            return None
        for start, axis in zip(starts, axes, strict=True):
            if axis in (-1, len(whole) - 1):
                return node.input[0], start if start >= 0 else max(0, start + whole[-1])
        return None
