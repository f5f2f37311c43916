"""float8 and int8 values with scales, and the rotation of ConvRot (arXiv 2512.03673).

comfy-kitchen rotates a matrix group by group along its columns: W H^T for H the Kronecker power of
[[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], divided by the root of its size, a power of 4. H is symmetric and
its own inverse, so the same product rotates back. comfy-kitchen multiplies float32 values, whose sum depends on its order;
here the int8 values are added up exactly, and the result is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt
from typing import TYPE_CHECKING, Any

from sdflow.sources.formats.mapped import STEP, mapped, row_range
from sdflow.sources.formats.plain import float8_values
from sdflow.sources.formats.stored import ALL, StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROTATED_GROUP = 256
"""Columns that are rotated together, where a description does not say."""
_LARGEST_GROUP = 4**8
"""int8 values of so many columns add up exactly."""


@dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """begin: of the values in the file, of one byte each. scale: one number, or a column. group: columns that are rotated
    together; None: they are not."""

    begin: int
    scale: NDArray[np.float32] = field(compare=False)
    group: int | None = None

    def values(self, rows: slice = ALL) -> NDArray[Any]:
        import numpy as np

        first, count, shape = row_range(rows, self.shape)
        raw = mapped(self.path, self.begin + first, count)
        scale = self.scale if self.scale.ndim == 0 else self.scale[rows]
        values: NDArray[Any]
        if self.dtype != "I8":
            values = float8_values(self.dtype)[raw].reshape(shape)
            values *= scale
            return values
        whole = raw.view(np.int8).reshape(shape)
        if self.group is None:
            values = whole.astype(np.float32)
            values *= scale
            return values
        values, step = np.empty(shape, np.float32), max(1, STEP // shape[1])
        for row in range(0, shape[0], step):
            part = slice(row, row + step)
            factor = scale if scale.ndim == 0 else scale[part]
            # The root is a power of 2: the division is exact.
            values[part] = rotated(whole[part], self.group).astype(np.float32) * (factor / isqrt(self.group))
        return values


def rotated(values: NDArray[np.int8], group: int) -> NDArray[np.int32]:
    """values H^T of whole numbers, without the division by the root of the group's size."""
    import numpy as np

    steps = (group.bit_length() - 1) // 2
    found = values.astype(np.int32).reshape(-1, *(4,) * steps)
    for axis in range(1, steps + 1):  # each factor: the sum of four, less twice the one opposite
        found = found.sum(axis, keepdims=True, dtype=np.int32) - 2 * np.flip(found, axis)
    return found.reshape(values.shape)


def require_group(size: Any, shape: tuple[int, ...]) -> int:
    """The size of a group that a matrix of this shape can be rotated in. Raises ValueError."""
    if not isinstance(size, int) or isinstance(size, bool) or not 4 <= size <= _LARGEST_GROUP:
        raise ValueError(f"a rotation of groups of {size!r:.40}")
    if size & (size - 1) or (size.bit_length() - 1) % 2:
        raise ValueError(f"a rotation of groups of {size}, which is no power of 4")
    if len(shape) != 2 or shape[1] % size:
        raise ValueError(f"a rotation of groups of {size} for a weight of {list(shape)}")
    return size
