"""Trace an attention's heads back to products, biases, norms and rotation, in a graph of fixed sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sdflow.onnx_model.nodes import attribute
from sdflow.runtime.kernels.graph_index import GraphIndex, Known

FLAT, BY_TOKEN, BY_HEAD = "(B, S, N H)", "(B, S, N, H)", "(B, N, S, H)"
"""Layouts of heads in a tensor."""
TOKENS = {FLAT: 1, BY_TOKEN: 1, BY_HEAD: 2}
"""Index of the token axis in each layout."""


@dataclass(frozen=True)
class Stream:
    """Heads of one stream's tokens: columns of a product from `column` on, plus a bias, RMS-normed. "" marks missing
    parts."""

    product: str
    column: int
    bias: str
    weight: str
    epsilon: float


@dataclass(frozen=True)
class Heads:
    """Heads of one or two streams. tables: of cosines and sines, before axes of size 1 are added."""

    streams: tuple[Stream, ...]
    tables: tuple[str, ...] = ()


class Reader(GraphIndex):
    """A graph with lookups of how its values are computed."""

    def __init__(self, graph: Any, known: Known) -> None:
        super().__init__(graph, known)
        self.unsigned: dict[str, list[Any]] = {}
        """Name of a table to add to the graph -> the nodes that compute it."""
        for node in self.nodes:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self._constants[node.output[0]] = node.attribute[0].t

    def made_by(self, name: str, *op_types: str) -> Any:
        """Return the producer of a value if it is one of these standard operators, otherwise None."""
        place = self.maker(name, *op_types)
        return None if place is None else self.nodes[place]

    def read_by(self, name: str, op_type: str) -> Any:
        """Return the only reader of a value if it is this standard operator, otherwise None."""
        place = self.only_reader(name)
        return self.nodes[place] if place is not None and self.is_plain(place, op_type) else None

    def scaled(self, name: str) -> tuple[str, float]:
        """Return the value that this one is a multiple of, and the factor."""
        if (node := self.made_by(name, "Mul", "Div")) is None:
            return name, 1.0
        for value, other in (node.input, reversed(node.input)):
            factor = self.numbers(other)
            if factor is not None and len(factor) == 1 and (node.op_type == "Mul" or other == node.input[1]):
                return value, float(factor[0] if node.op_type == "Mul" else 1 / factor[0])
        return name, 1.0

    def numbers(self, name: str) -> list[Any] | None:
        """Return the values of a small constant, or None."""
        from onnx import numpy_helper

        tensor = self._constants.get(name)
        if tensor is None or tensor.external_data or math.prod(tensor.dims) > 8:
            return None
        return [
            float(each) if each.dtype.kind not in "iu" else int(each)
            for each in numpy_helper.to_array(tensor).flatten()
        ]

    def window(self, node: Any) -> tuple[int, int, int] | None:
        """Return axis, start and step of a Slice along one axis, or None."""
        shape = self.shape(node.input[0])
        found = [self.numbers(name) for name in node.input[1:]]
        if len(found) < 3 or any(each is None or len(each) != 1 for each in found) or not shape:
            return None
        starts, _, axes, *steps = [int(each[0]) for each in found if each]
        axis = axes % len(shape)
        return axis, starts + shape[axis] if starts < 0 else starts, steps[0] if steps else 1

    def heads(self, name: str, order: str, count: int, size: int) -> Heads | None:
        """Return how a value with `count` heads of `size` channels in this layout is computed, or None if
        unsupported."""
        name, order = self._unfolded(name, order, count, size)
        tables: tuple[str, ...] = ()
        if order != FLAT and (rotation := self._rotation(name, order)):
            name, tables = rotation
            name, order = self._unfolded(name, order, count, size)
        parts = [name]
        if node := self.made_by(name, "Concat"):
            if attribute(node, "axis", 0) % len(self.shape(name) or [0]) != TOKENS[order] or len(node.input) != 2:
                return None
            parts = list(node.input)
        streams = [self._stream(part, order, count, size) for part in parts]
        found = tuple(stream for stream in streams if stream is not None)
        return Heads(found, tables) if len(found) == len(streams) else None

    def _unfolded(self, name: str, order: str, count: int, size: int) -> tuple[str, str]:
        """Look through reshapes and transposes; return the original value and its layout."""
        while node := self.made_by(name, "Reshape", "Transpose"):
            before, shape = self.shape(node.input[0]), self.shape(name)
            if node.op_type == "Transpose":
                if order == FLAT or attribute(node, "perm", ()) != [0, 2, 1, 3]:
                    break
                order = BY_HEAD if order == BY_TOKEN else BY_TOKEN
            elif order != BY_HEAD and before == [*shape[:2], count * size]:
                order = FLAT
            elif order != BY_HEAD and before == [*shape[:2], count, size]:
                order = BY_TOKEN
            else:
                break
            name = node.input[0]
        return name, order

    def _stream(self, name: str, order: str, count: int, size: int) -> Stream | None:
        name, order = self._unfolded(name, order, count, size)
        weight, epsilon = "", 0.0
        if node := self.made_by(name, "SimplifiedLayerNormalization"):
            if order == FLAT or attribute(node, "axis", -1) not in (-1, 3) or self.shape(node.input[1]) != [size]:
                return None
            weight, epsilon = node.input[1], attribute(node, "epsilon", 1e-5)
            name, order = self._unfolded(node.input[0], order, count, size)
        if order != FLAT:
            return None
        bias = ""
        if node := self.made_by(name, "Add"):
            for value, other in (node.input, reversed(node.input)):
                if self.shape(other) == [count * size] and self.shape(value) == self.shape(name):
                    name, bias = value, other
                    break
        rows = self.shape(name)[:2]
        product, column = self.part(name)
        if len(self.shape(product)) != 3 or self.shape(product)[:2] != rows:
            return None
        return Stream(product, column, bias, weight, epsilon)

    def _rotation(self, name: str, order: str) -> tuple[str, tuple[str, str]] | None:
        """Match x cosine + crossed(x) sine; return x and the tables. FLUX.1's graph swaps pairs instead of crossing
        them; its sine table contains the signs."""
        node = self.made_by(name, "Add")
        if node is None:
            return None
        for plain, turned in (node.input, reversed(node.input)):
            first, second = self.made_by(plain, "Mul"), self.made_by(turned, "Mul")
            if first is None or second is None:
                continue
            for crossed, sine in (second.input, reversed(second.input)):
                value, signed = self._crossed(crossed), False
                if value is None:
                    value, signed = self._swapped(crossed), True
                if value is None or value not in first.input or self.shape(value) != self.shape(name):
                    continue
                cosine = first.input[1 - list(first.input).index(value)]
                if self._is_table(cosine, value, order) and self._is_table(sine, value, order):
                    root = self._root(sine)
                    return value, (self._root(cosine), self._unsigned(root) if signed else root)
        return None

    def _is_table(self, name: str, value: str, order: str) -> bool:
        images, *_, size = self.shape(value)
        wanted = [[several, 1, 1, size] for several in (1, images)]
        for each in wanted:
            each[TOKENS[order]] = self.shape(value)[TOKENS[order]]
        return self.shape(name) in wanted

    def _root(self, name: str) -> str:
        """Return a table before axes of size 1 were added."""
        while (node := self.made_by(name, "Unsqueeze", "Squeeze", "Reshape")) and self.shape(node.input[0]):
            name = node.input[0]
        return name

    def _crossed(self, name: str) -> str | None:
        """Return x if this is (-x1, x0, -x3, x2, ...), otherwise None."""
        folded = self.made_by(name, "Reshape")
        pairs = folded and self.made_by(folded.input[0], "Concat")
        if not pairs or len(pairs.input) != 2 or self.shape(folded.input[0])[-1:] != [2]:
            return None
        if attribute(pairs, "axis", 0) not in (-1, len(self.shape(folded.input[0])) - 1):
            return None
        odd, even = (self._every_other(each) for each in pairs.input)
        if odd is None or even is None or odd[0] != even[0] or odd[1:] != (1, True) or even[1:] != (0, False):
            return None
        x: str = odd[0]
        return x if self.shape(x) == self.shape(name) else None

    def _swapped(self, name: str) -> str | None:
        """Return x if this is (x1, x0, x3, x2, ...), otherwise None."""
        node = self.made_by(name, "Gather")
        if node is None or attribute(node, "axis", 0) not in (-1, len(self.shape(name)) - 1):
            return None
        order, x = self.constant(node.input[1]), str(node.input[0])
        if order is None or order.tolist() != [channel ^ 1 for channel in range(self.shape(name)[-1])]:
            return None
        return x if self.shape(x) == self.shape(name) else None

    def _unsigned(self, sine: str) -> str:
        """Return the sine table for crossed pairs from one for swapped pairs: negating every other channel is exact."""
        from onnx import helper

        name = f"{sine}_for_crossed"
        if name not in self.unsigned:
            element, shape = self.known[sine]
            signs = helper.make_tensor(f"{name}_signs", element, [shape[-1]], [-1.0, 1.0] * (shape[-1] // 2))
            constant = helper.make_node("Constant", [], [signs.name], value=signs)
            self.unsigned[name] = [constant, helper.make_node("Mul", [sine, signs.name], [name], name)]
            self.known[name] = element, shape
        return name

    def _every_other(self, name: str) -> tuple[str, int, bool] | None:
        """Return x, 0 for its even or 1 for its odd channels, and whether they are negated; or None."""
        negated = False
        while node := self.made_by(name, "Unsqueeze", "Squeeze", "Neg"):
            before, after = self.shape(node.input[0]), self.shape(name)
            if node.op_type == "Neg":
                negated = not negated
            elif after != [*before, 1] and before != [*after, 1]:
                return None
            name = node.input[0]
        node = self.made_by(name, "Split", "Slice", "Gather")
        if node is None:
            return None
        rank = len(self.shape(node.input[0]))
        if node.op_type == "Slice":
            window = self.window(node)
            whole = self.shape(node.input[0])[-1] // 2
            if window is None or window[0] != rank - 1 or window[2] != 2 or self.shape(name)[-1] != whole:
                return None
            return node.input[0], window[1], negated
        folded = self.made_by(node.input[0], "Reshape")
        if folded is None or self.shape(node.input[0])[-1] != 2 or attribute(node, "axis", 0) not in (-1, rank - 1):
            return None
        if node.op_type == "Split":
            which = list(node.output).index(name) if len(node.output) == 2 else -1
        else:
            index = self.numbers(node.input[1]) or [-1]
            which = int(index[0]) % 2 if len(index) == 1 else -1
        return (folded.input[0], which, negated) if which >= 0 else None
