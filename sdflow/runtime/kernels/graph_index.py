"""An index of a graph of fixed sizes for pattern matching: producers, readers, types and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sdflow.onnx_model.nodes import attribute

Known = Mapping[str, tuple[int, list[int]]]
"""Value -> (element type, shape)."""


class GraphIndex:
    """Lookups in one graph.

    nodes: the graph's nodes in topological order, referred to by index.
    """

    def __init__(self, graph: Any, known: Known) -> None:
        self.nodes = list(graph.node)
        self.known: dict[str, tuple[int, list[int]]] = {
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
        """Return the ONNX element type of a value, or 0 if unknown."""
        return self.known.get(name, (0, []))[0]

    def shape(self, name: str) -> list[int]:
        """Return the shape of a value, empty if unknown."""
        return self.known.get(name, (0, []))[1]

    def readers(self, name: str) -> list[int]:
        """Return the readers' indices, one per use; empty for graph outputs, which are read elsewhere."""
        return [] if name in self._results else self._readers.get(name, [])

    def only_reader(self, name: str) -> int | None:
        """Return the index of the only node that reads a value, if it reads it once."""
        found = self.readers(name)
        return found[0] if len(found) == 1 else None

    def maker(self, name: str, *op_types: str) -> int | None:
        """Return the index of a value's producer if it is one of these standard operators."""
        place = self._makers.get(name)
        return place if place is not None and self.is_plain(place, *op_types) else None

    def is_plain(self, place: int, *op_types: str) -> bool:
        """Whether the node is one of these standard operators."""
        node = self.nodes[place]
        return node.domain in ("", "ai.onnx") and node.op_type in op_types

    def constant(self, name: str) -> Any | None:
        """Return the array of an initializer stored in the graph itself, or None."""
        import onnx

        tensor = self._constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return onnx.numpy_helper.to_array(tensor)

    def attribute(self, place: int, name: str, default: Any) -> Any:
        """Return a node's attribute."""
        return attribute(self.nodes[place], name, default)

    def depends(self, names: Collection[str], on: Collection[int]) -> bool:
        """Whether any of the values depends, directly or indirectly, on the output of a node in `on`."""
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
        """Return the value whose last axis this one is a part of, through Slice and Split, and the offset."""
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
