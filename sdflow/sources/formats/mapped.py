"""Parts of a file as memory-mapped arrays."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError, os_errors_as
from sdflow.sources.formats.stored import ALL

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP = 1 << 22
"""Values dequantized at a time, which limits temporary memory."""


def mapped(path: Path, begin: int, length: int) -> NDArray[Any]:
    """Map bytes of a file. Raises CheckpointError if the file ends earlier."""
    import numpy as np

    if length == 0:
        return np.empty(0, np.uint8)
    try:
        with os_errors_as("cannot be read", path, kind=CheckpointError):
            return np.asarray(np.memmap(path, np.uint8, "r", begin, (length,)))
    except ValueError as error:  # numpy's error for a shorter file
        raise CheckpointError(
            f"it ends before byte {begin + length}", where=str(path), remedy="Download the file again."
        ) from error


def row_range(rows: slice, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """The first value of some rows of a row-major tensor, their number of values, and their shape."""
    if not shape or rows == ALL:
        return 0, prod(shape), shape
    begin, end, _ = rows.indices(shape[0])
    width = prod(shape[1:])
    return begin * width, (end - begin) * width, (end - begin, *shape[1:])
