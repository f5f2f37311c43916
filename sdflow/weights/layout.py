"""Fast conversion to C order.

numpy copies a transposed matrix along the result's rows: each value it reads is in another cache line, which is evicted
before its neighbour is read. Tiles stay in the cache unless their rows are a power of two apart, since such addresses
share few cache lines. So each tile is first copied to a buffer whose rows are one cache line longer. A 10240 x 1280
float16 matrix goes from 0.24 to 2.1 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = (512, 256)
"""Rows and columns of the source copied at a time."""
LINE = 64
"""Bytes per cache line."""

Array = NDArray[Any]


def contiguous(values: Array) -> Array:
    """Return the values C-contiguous, without a copy if they already are."""
    if values.flags.c_contiguous:
        return values
    copied = np.empty(values.shape, values.dtype)
    copy_into(copied, values)
    return copied


def joined(parts: Sequence[Array], axis: int) -> Array:
    """Concatenate the parts along a non-negative axis, like `numpy.concatenate`, including its ValueError."""
    if all(part.flags.c_contiguous for part in parts) or any(part.dtype != parts[0].dtype for part in parts):
        return np.concatenate(parts, axis)
    first = parts[0].shape
    if any(part.shape[:axis] + part.shape[axis + 1 :] != first[:axis] + first[axis + 1 :] for part in parts):
        raise ValueError(f"parts of shapes {[part.shape for part in parts]} do not fit along axis {axis}")
    ends = np.cumsum([part.shape[axis] for part in parts])
    whole = np.empty((*first[:axis], int(ends[-1]), *first[axis + 1 :]), parts[0].dtype)
    for place, part in zip(np.split(whole, ends[:-1], axis), parts, strict=True):
        copy_into(place, part)
    return whole


def copy_into(target: Array, values: Array) -> None:
    """Copy values into an array of the same shape."""
    if values.ndim == 2 and values.strides[0] < values.strides[1]:  # a transposed matrix
        _copy_tiles(target, values.T)
    else:
        target[...] = values


def _copy_tiles(target: Array, source: Array) -> None:
    """Compute `target[...] = source.T` for a source with contiguous rows."""
    rows, columns = TILE
    aside = np.empty((rows, columns + LINE // source.itemsize), source.dtype)
    for top in range(0, source.shape[0], rows):
        for left in range(0, source.shape[1], columns):
            tile = source[top : top + rows, left : left + columns]
            copy = aside[: tile.shape[0], : tile.shape[1]]
            copy[...] = tile
            target[left : left + columns, top : top + rows] = copy.T
