"""Rotations by Hadamard matrices: they spread single large values over a group, so that fewer bits lose less.

The matrix of size 1 is 1; that of size 2n has those of size n in its quarters, the last of them negated (Sylvester). Over the
square root of its size it is orthogonal, and its own inverse: values and weights that are both rotated have the same product as
before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SIZES = (16, 32, 64, 128, 256)


def matrix(size: int) -> Array:
    """The orthogonal matrix, float32. size: a power of two."""
    made: Array = np.ones((1, 1), np.float32)
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    scaled: Array = (made / np.sqrt(np.float32(size))).astype(np.float32)
    return scaled


def rotated(values: Array, axis: int, size: int) -> Array:
    """Float32 values times the matrix along an axis, each `size` of them by themselves. size: a power of two that divides the
    axis. Sums are taken pair by pair, in the same order on every machine."""
    along = np.moveaxis(np.asarray(values, np.float32), axis, -1)
    now = np.array(along.reshape(-1, size), order="C")
    width = 1
    while width < size:
        pairs = now.reshape(-1, size // (2 * width), 2, width)
        first, second = pairs[:, :, 0].copy(), pairs[:, :, 1]
        pairs[:, :, 0] += second
        np.subtract(first, second, out=pairs[:, :, 1])
        width *= 2
    now /= np.sqrt(np.float32(size))
    return np.ascontiguousarray(np.moveaxis(now.reshape(along.shape), -1, axis))
