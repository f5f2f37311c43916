"""Hadamard rotations, which spread outliers over a group to reduce quantization error.

The matrix of size 1 is 1; each quarter of that of size 2n is that of size n, negated in the last one (Sylvester).
Divided by the square root of its size, it is orthogonal and its own inverse, so a product of rotated values and rotated
weights is unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SIZES = (16, 32, 64, 128, 256)


def matrix(size: int) -> Array:
    """Return the orthogonal matrix, float32. size: a power of two."""
    made: Array = np.ones((1, 1), np.float32)
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    scaled: Array = (made / np.sqrt(np.float32(size))).astype(np.float32)
    return scaled


def rotated(values: Array, axis: int, size: int) -> Array:
    """Multiply float32 values by the matrix along an axis, in groups of `size`, a power of two that divides the axis.
    Sums are pairwise, in the same order on every machine."""
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
