"""Products of two factors in float32, without torch, bit-identical on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

MOST_WITH_LOW_PARTS = 0.5
"""Share of rows and columns with low parts from which one product of everything is cheaper."""


_BLOCK = 1 << 15
"""Values of a product per block, which stay in the processor's cache."""

Tiles = Callable[[slice, slice], "Floats"]
"""Returns the values of a product in these rows and columns, as slices with ends; the next call reuses their memory."""


def product(up: Floats, down: Floats, scale: np.float32 | float = 1.0) -> Floats:
    """up @ down, times the scale, bit-identical on every machine, although float32 sums depend on a processor's order."""
    return tiles_of_product(up, down, scale)(slice(0, len(up)), slice(0, down.shape[1]))


def tiles_of_product(up: Floats, down: Floats, scale: np.float32 | float = 1.0) -> Tiles:
    """Return a function to parts of `product`, bit-identical to it.

    Each factor is split into two integers, short enough that products and their sums are exact in float64 in any order
    (Ozaki et al. 2012, https://doi.org/10.1007/s11075-011-9478-1). The omitted part is 2**-44 of the largest.
    """
    import numpy as np

    bits = (53 - (up.shape[1] - 1).bit_length()) // 2
    (high_up, low_up, unit_up), (high_down, low_down, unit_down) = _cut(up, bits), _cut(down, bits)
    # Factors of powers of two are exact anywhere; here they are cheapest.
    high_up *= unit_up * unit_down
    low_up *= unit_up * unit_down * 2.0**-bits
    left, right = np.hstack([high_up * 2.0**-bits, low_up]), np.vstack([low_down, high_down])
    # float16's few bits are in the high parts, except for the smallest values: few rows and columns have low parts.
    rows, columns = np.flatnonzero(low_up.any(axis=1)), np.flatnonzero(low_down.any(axis=0))
    all_low = len(rows) / max(1, len(low_up)) + len(columns) / max(1, low_down.shape[1]) > MOST_WITH_LOW_PARTS
    kept: dict[type, NDArray[Any]] = {}

    def scratch(kind: type, height: int, width: int) -> NDArray[Any]:
        if kind not in kept or kept[kind].size < height * width:
            kept[kind] = np.empty(height * width, kind)
        return kept[kind][: height * width].reshape(height, width)

    def tile(some_rows: slice, some_columns: slice) -> Floats:
        first, last, left_end, right_end = some_rows.start, some_rows.stop, some_columns.start, some_columns.stop
        height, width = last - first, right_end - left_end
        step = min(height, max(1, _BLOCK // max(1, width)))
        found = scratch(np.float32, height, width)
        total = scratch(np.float64, step, width)
        above, below = high_down[:, some_columns], right[:, some_columns]
        low_columns = columns[slice(*np.searchsorted(columns, (left_end, right_end)))] - left_end
        for begin in range(first, last, max(1, step)):
            end = min(begin + step, last)
            sums = np.matmul(high_up[begin:end], above, out=total[: end - begin])
            if all_low:
                sums += left[begin:end] @ below
            else:
                low = rows[slice(*np.searchsorted(rows, (begin, end)))]
                whole_rows = sums[low - begin] + left[low] @ below if low.size else None
                if low_columns.size:
                    sums[:, low_columns] += left[begin:end] @ below[:, low_columns]
                if whole_rows is not None:
                    sums[low - begin] = whole_rows
            found[begin - first : end - first] = sums
        found *= scale
        return found

    return tile


def _cut(factor: Floats, bits: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """(high, low, unit): integers of at most `bits` bits with factor = unit * (high + low / 2**bits), approximately."""
    import numpy as np

    unit = 2.0 ** (int(np.frexp(np.abs(factor).max(initial=0))[1]) - bits)
    scaled = factor.astype(np.float64) / unit
    high = np.rint(scaled)
    return high, np.rint((scaled - high) * 2.0**bits), unit


def times_core(core: Floats, down: Floats) -> Floats:
    """Two factors of a Tucker decomposition, (rank, rank, kernel) and (rank, columns), as one: (rank, columns *
    kernel)."""
    rank, _, kernel = core.shape
    spread = core.transpose(0, 2, 1).reshape(rank * kernel, rank)
    found: Floats = product(spread, down).reshape(rank, kernel, -1).transpose(0, 2, 1).reshape(rank, -1)
    return found
