"""Values of a transformer as its kernels read them: rows of channels, and what is one row for each image."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdflow.runtime.kernels.graph_index import GraphIndex

VECTOR, MOST_AXES = 8, 5
"""As in residual_norm.c: channels of a vector; axes of a value."""
MOST_CHANNELS = 12288
"""Of a row: RESIDUAL_THREADS with RESIDUAL_HELD vectors each."""


@dataclass(frozen=True)
class Row:
    """A row for each image: the last axis of `value` from channel `first` on, plus 1 where `plus_one`."""

    value: str
    first: int = 0
    plus_one: bool = False


def has_rows(index: GraphIndex, name: str) -> bool:
    """Of a type and shape that the kernel reads as rows of channels."""
    import onnx

    shape = index.shape(name)
    if index.element(name) not in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
        return False
    if not 3 <= len(shape) <= MOST_AXES or not all(shape):
        return False
    return shape[-1] % VECTOR == 0 and shape[-1] <= MOST_CHANNELS


def row_of(index: GraphIndex, name: str, of: str, *, plus_one: bool = False) -> Row | None:
    """`name` as a row for each image of `of`, or for all. plus_one: whether a 1 that is added may be left to the kernel."""
    wanted, shape = index.shape(of), index.shape(name)
    images, channels = wanted[0], wanted[-1]
    padded = [1] * (len(wanted) - len(shape)) + shape
    if not shape or len(padded) != len(wanted) or padded[-1] != channels or padded[0] not in (1, images):
        return None
    if any(axis != 1 for axis in padded[1:-1]) or index.element(name) != index.element(of):
        return None
    rows, best, first, added = padded[0], Row(name), 0, False
    while True:
        whole, start = index.part(name)
        if start or whole != name:
            name, first = whole, first + start
        elif (inner := _unshaped(index, name)) is not None:
            name = inner
        elif plus_one and not added and (inner := _without_one(index, name)) is not None:
            name, added = inner, True
        else:
            return best
        shape = index.shape(name)
        if math.prod(shape[:-1]) == rows and shape[-1] % VECTOR == 0 and first % VECTOR == 0:
            best = Row(name, first, added)


def _unshaped(index: GraphIndex, name: str) -> str | None:
    """What a row was before axes of 1 were put in or taken out."""
    place = index.maker(name, "Unsqueeze", "Squeeze", "Reshape")
    if place is None:
        return None
    inner: str = index.nodes[place].input[0]
    shape = index.shape(inner)
    return inner if shape and shape[-1] == index.shape(name)[-1] else None


def _without_one(index: GraphIndex, name: str) -> str | None:
    place = index.maker(name, "Add")
    if place is None:
        return None
    for one, other in both_ways(index, place):
        value = index.constant(one)
        if (
            value is not None
            and value.size == 1
            and float(value.item()) == 1
            and index.shape(other) == index.shape(name)
        ):
            return other
    return None


def both_ways(index: GraphIndex, place: int) -> list[tuple[str, str]]:
    """The inputs of a node that has two, in both orders."""
    a, b = index.nodes[place].input
    return [(a, b), (b, a)]


def is_by_channel(index: GraphIndex, name: str, of: str) -> bool:
    """One number for each channel."""
    return index.shape(name) == index.shape(of)[-1:] and index.element(name) == index.element(of)


def without_bias(index: GraphIndex, name: str) -> tuple[str, str, tuple[int, ...]] | None:
    """Where a value that is read once, or in one place, is something plus a bias: that, the bias, the Add's place."""
    place = index.maker(name, "Add")
    if place is None:
        return None
    for bias, value in both_ways(index, place):
        if is_by_channel(index, bias, name) and index.shape(value) == index.shape(name):
            return value, bias, (place,)
    return None
