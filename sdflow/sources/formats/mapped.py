"""Parts of a file as arrays: mapped, read as they are used, then let go."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError, os_errors_as
from sdflow.sources.formats.stored import ALL

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP = 1 << 22
"""Values that are dequantized at a time, so that what it takes besides the result is bounded."""


def mapped(path: Path, begin: int, length: int) -> NDArray[Any]:
    """Bytes of a file. Raises CheckpointError where the file ends before."""
    import numpy as np

    if length == 0:
        return np.empty(0, np.uint8)
    try:
        with os_errors_as("cannot be read", path, kind=CheckpointError):
            return np.asarray(np.memmap(path, np.uint8, "r", begin, (length,)))
    except ValueError as error:  # numpy's word for a file that is shorter than that
        raise CheckpointError(
            f"it ends before byte {begin + length}", where=str(path), remedy="Download the file again."
        ) from error


def row_range(rows: slice, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """The first value of some rows of a tensor in row-major order, how many they are, and their shape."""
    if not shape or rows == ALL:
        return 0, prod(shape), shape
    begin, end, _ = rows.indices(shape[0])
    width = prod(shape[1:])
    return begin * width, (end - begin) * width, (end - begin, *shape[1:])
