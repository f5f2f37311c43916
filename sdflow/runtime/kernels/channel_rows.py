"""Transformer values as the kernels read them: rows of channels, and single rows per image."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sdflow.runtime.kernels.graph_index import GraphIndex

VECTOR, MOST_AXES = 8, 5
"""As in residual_norm.c: channels of a vector; maximum number of axes."""
MOST_CHANNELS = 12288
"""Maximum row width: RESIDUAL_THREADS with RESIDUAL_HELD vectors each."""


@dataclass(frozen=True)
class Row:
    """One row per image: the last axis of `value` from channel `first` on, plus 1 if `plus_one`."""

    value: str
    first: int = 0
    plus_one: bool = False


def has_rows(index: GraphIndex, name: str) -> bool:
    """Whether the kernel supports the value's type and shape as rows of channels."""
    import onnx

    shape = index.shape(name)
    if index.element(name) not in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
        return False
    if not 3 <= len(shape) <= MOST_AXES or not all(shape):
        return False
    return shape[-1] % VECTOR == 0 and shape[-1] <= MOST_CHANNELS


def row_of(index: GraphIndex, name: str, of: str, *, plus_one: bool = False) -> Row | None:
    """Return `name` as one row per image of `of`, or for all, or None. plus_one: whether the kernel may add a 1
    itself."""
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
    """Return a row before axes of 1 were inserted or removed, or None."""
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
    """Return both inputs of a binary node, in both orders."""
    a, b = index.nodes[place].input
    return [(a, b), (b, a)]


def is_by_channel(index: GraphIndex, name: str, of: str) -> bool:
    """Whether the value has one number per channel."""
    return index.shape(name) == index.shape(of)[-1:] and index.element(name) == index.element(of)


def without_bias(index: GraphIndex, name: str) -> tuple[str, str, tuple[int, ...]] | None:
    """If a value is the sum of something and a bias, return that, the bias, and the Add's index."""
    place = index.maker(name, "Add")
    if place is None:
        return None
    for bias, value in both_ways(index, place):
        if is_by_channel(index, bias, name) and index.shape(value) == index.shape(name):
            return value, bias, (place,)
    return None
