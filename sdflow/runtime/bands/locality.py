"""Determine which input rows a node's output rows depend on.

A band is run as if it were a whole image, so rows next to a cut are wrong: operators such as convolutions read padding there
instead of the neighbouring rows. Each such operator adds wrong rows, which are discarded at the end. Operators that are not
listed here, or that read rows in another way, cannot run in bands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from typing import Any

from sdflow.onnx_model.nodes import attribute
from sdflow.runtime.bands.norms import MICROSOFT, Shape, refused

PER_VALUE = frozenset({
    "Abs", "Add", "Cast", "Clip", "Div", "Erf", "Exp", "Gelu", "Identity", "LeakyRelu", "Max", "Min", "Mul", "Neg", "Pow",
    "QuickGelu", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh",
})  # fmt: skip
"""Elementwise operators."""

MOVES = frozenset(["Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
"""Operators that only change the shape of their first input. Later stages repeat them instead of reading a stored result."""


@dataclass(frozen=True)
class Rows:
    """How a value is divided into bands. axis: of its rows. wrong: number of wrong rows at each cut."""

    axis: int
    wrong: int = 0


class Locality:
    """Applies the rules to the nodes of one graph.

    band, whole: shapes of all values, for a band and for the whole image. constants: values of small constants. least,
    most: latent rows of the band and of the whole image.
    """

    def __init__(
        self, band: Mapping[str, Shape], whole: Mapping[str, Shape], constants: Mapping[str, Any], least: int, most: int
    ) -> None:
        self._band, self._whole, self._constants = band, whole, constants
        self._least, self._most = least, most
        self.rows: dict[str, Rows] = {}

    def start(self, name: str) -> None:
        """Add an input of the graph: the rows are its only axis whose size varies."""
        (axis,) = (axis for axis in range(len(self._band[name])) if self._varies(name, axis))
        self.rows[name] = Rows(axis)

    def whole_inputs(self, node: Any) -> list[str]:
        """Return the inputs that a node needs whole to compute any row: a product's second factor."""
        return [name for name in node.input[1:] if name in self.rows] if node.op_type == "MatMul" else []

    def add(self, node: Any) -> None:
        """Add a node's outputs, if they have rows. Raises PassError if it cannot run in bands."""
        reads = [name for name in node.input if name in self.rows]
        if not reads:
            if any(self._varies(name, axis) for name in node.output for axis in range(len(self._band[name]))):
                raise refused(node, "the size of its output depends on the image's, but those of its inputs do not")
            return
        rule = _RULES.get((node.domain.replace("ai.onnx", ""), node.op_type))
        if rule is None:
            raise refused(node, "it is not known which rows it reads")
        found = rule(self, node, [self.rows.get(name) for name in node.input])
        if found is None or not self._varies(node.output[0], found.axis):
            raise refused(node, "it reads rows in an unsupported way")
        if self._per_row(node.output[0], found.axis).denominator != 1:
            raise refused(node, "its output has fewer rows than the latents")  # a band may begin between two of them
        for name in filter(None, node.output):
            self.rows[name] = found

    def scale(self, name: str) -> int | None:
        """Return the number of a value's rows per row of the latents; None if it is not a whole number."""
        axis = self.rows[name].axis
        band, whole = self._band[name][axis], self._whole[name][axis]
        scale = Fraction(whole, self._most)
        return int(scale) if scale.denominator == 1 and band == scale * self._least else None

    def _varies(self, name: str, axis: int) -> bool:
        return axis < len(self._band[name]) and self._band[name][axis] != self._whole[name][axis]

    def _per_row(self, name: str, axis: int) -> Fraction:
        """Return the number of a value's rows per latent row."""
        return Fraction(self._whole[name][axis] - self._band[name][axis], self._most - self._least)

    def _ratio(self, before: str, before_axis: int, after: str, after_axis: int) -> Fraction:
        """Return the number of rows of `after` per row of `before`."""
        return self._per_row(after, after_axis) / self._per_row(before, before_axis)

    def per_value(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """Each output row is computed from the same row of every input that has rows."""
        rank = len(self._band[node.output[0]])
        axes = {rank - len(self._band[name]) + rows.axis for name, rows in zip(node.input, inputs, strict=True) if rows}
        return Rows(axes.pop(), _most_wrong(inputs)) if len(axes) == 1 else None

    def conv(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """At a cut, padding stands in for rows of the image: as many more rows are wrong, divided by the stride."""
        first, *others = inputs
        last = node.op_type == "NhwcConv"
        if first is None or any(others) or len(self._band[node.input[0]]) != 4 or first.axis != (1 if last else 2):
            return None
        if attribute(node, "auto_pad", b"NOTSET") != b"NOTSET":
            return None
        pads, strides = attribute(node, "pads", [0, 0, 0, 0]), attribute(node, "strides", [1, 1])
        if self._ratio(node.input[0], first.axis, node.output[0], first.axis) * strides[0] != 1:
            return None
        return Rows(first.axis, ceil((first.wrong + max(pads[0], pads[2])) / strides[0]))

    def resize(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """Interpolation by a whole factor reads one neighbouring row at either side."""
        first = inputs[0]
        if first is None or attribute(node, "mode", b"nearest") not in (b"nearest", b"linear"):
            return None
        if attribute(node, "coordinate_transformation_mode", b"half_pixel") not in (b"half_pixel", b"asymmetric"):
            return None
        ratio = self._ratio(node.input[0], first.axis, node.output[0], first.axis)
        before, after = (self._whole[name][first.axis] for name in (node.input[0], node.output[0]))
        if ratio.denominator != 1 or after != ratio * before:
            return None
        return Rows(first.axis, ceil((first.wrong + 1) * ratio))

    def transpose(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """Rows move to another axis."""
        (first,) = inputs
        rank = len(self._band[node.input[0]])
        order = list(attribute(node, "perm", range(rank)[::-1]))
        return None if first is None else Rows(order.index(first.axis), first.wrong)

    def reshape(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """Rows stay intact if an output axis has as many values in front of it as the rows', in a band and in the whole."""
        first, result = inputs[0], node.output[0]
        if first is None:
            return None
        for axis in range(len(self._band[result])):
            outer = [
                (prod(shapes[node.input[0]][: first.axis]), prod(shapes[result][:axis]))
                for shapes in (self._band, self._whole)
            ]
            if self._varies(result, axis) and all(before == after for before, after in outer):
                ratio = self._ratio(node.input[0], first.axis, result, axis)
                return Rows(axis, ceil(first.wrong * ratio))
        return None

    def concat(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """Inputs, which must all have rows, are joined along another axis."""
        axes = {rows.axis for rows in inputs if rows}
        joined = attribute(node, "axis", 0) % len(self._band[node.output[0]])
        return Rows(axes.pop(), _most_wrong(inputs)) if len(axes) == 1 and joined not in axes and all(inputs) else None

    def slice(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """A fixed number of rows may be cut off at either end."""
        first, given = inputs[0], [self._constants[name] for name in node.input[1:] if name in self._constants]
        if first is None or len(given) < len(node.input) - 1:
            return None
        starts, _, axes, *steps = given if len(given) > 2 else [*given, range(len(given[0]))]
        rank = len(self._band[node.input[0]])
        for place, axis in enumerate(axes):
            if axis % rank == first.axis and (starts[place] < 0 or (steps and steps[0][place] != 1)):
                return None
        same = self._ratio(node.input[0], first.axis, node.output[0], first.axis) == 1
        return first if same else None

    def expand(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """The first input is repeated along other axes; leading axes may be added."""
        first, *others = inputs
        ranks = [len(self._band[name]) for name in (node.input[0], node.output[0])]
        return None if first is None or any(others) else Rows(first.axis + ranks[1] - ranks[0], first.wrong)

    def pad(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """At a cut, the added zeros stand in for rows of the image, so they are wrong too."""
        first, pads = inputs[0], self._constants.get(node.input[1])
        if first is None or pads is None or attribute(node, "mode", b"constant") != b"constant" or len(node.input) > 3:
            return None
        return Rows(first.axis, first.wrong + max(pads[first.axis], pads[first.axis + len(pads) // 2]))

    def product(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """Rows of the first factor are those of the product; the second factor is read whole."""
        first, rank = inputs[0], len(self._band[node.input[0]])
        same = rank == len(self._band[node.output[0]])
        return first if first is not None and first.axis == rank - 2 and same else None

    def softmax(self, node: Any, inputs: Sequence[Rows | None]) -> Rows | None:
        """Rows stay independent if the sum runs along another axis."""
        (first,) = inputs
        axis = attribute(node, "axis", -1) % len(self._band[node.input[0]])
        return first if first is not None and first.axis != axis else None


def _most_wrong(inputs: Sequence[Rows | None]) -> int:
    return max(rows.wrong for rows in inputs if rows)


_Rule = Callable[[Locality, Any, Sequence["Rows | None"]], "Rows | None"]
_RULES: Mapping[tuple[str, str], _Rule] = {
    **{(domain, op_type): Locality.per_value for op_type in PER_VALUE for domain in ("", MICROSOFT)},
    **{("", op_type): Locality.reshape for op_type in ("Reshape", "Squeeze", "Unsqueeze")},
    ("", "Conv"): Locality.conv,
    (MICROSOFT, "NhwcConv"): Locality.conv,
    ("", "Resize"): Locality.resize,
    ("", "Transpose"): Locality.transpose,
    ("", "Concat"): Locality.concat,
    ("", "Slice"): Locality.slice,
    ("", "Expand"): Locality.expand,
    ("", "Pad"): Locality.pad,
    ("", "MatMul"): Locality.product,
    ("", "Softmax"): Locality.softmax,
}
