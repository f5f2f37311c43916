"""Products of two factors in float32, without torch, bit-identical on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

MOST_WITH_LOW_PARTS = 0.5
"""Share of rows and columns with low parts from which one product of everything is cheaper."""


_BLOCK = 1 << 16
"""Values of a product per block, which stay in the processor's cache."""


def product(up: Floats, down: Floats, scale: np.float32 | float = 1.0) -> Floats:
    """up @ down, times the scale, bit-identical on every machine, although float32 sums depend on a processor's order."""
    return rows_of_product(up, down, scale)(0, len(up))


def rows_of_product(up: Floats, down: Floats, scale: np.float32 | float = 1.0) -> Callable[[int, int], Floats]:
    """Return a function from the first and the last row (exclusive) to these rows of `product`, bit-identical to it.

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
    right_columns = right[:, columns]
    width = down.shape[1]
    step = max(1, _BLOCK // max(1, width))

    def some(first: int, last: int) -> Floats:
        found = np.empty((last - first, width), np.float32)
        total = np.empty((min(step, len(found)), width))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            sums = np.matmul(high_up[begin:end], high_down, out=total[: end - begin])
            if all_low:
                sums += left[begin:end] @ right
            else:
                low = rows[slice(*np.searchsorted(rows, (begin, end)))]
                whole_rows = sums[low - begin] + left[low] @ right if low.size else None
                if columns.size:
                    sums[:, columns] += left[begin:end] @ right_columns
                if whole_rows is not None:
                    sums[low - begin] = whole_rows
            found[begin - first : end - first] = sums
            found[begin - first : end - first] *= scale
        return found

    return some


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
