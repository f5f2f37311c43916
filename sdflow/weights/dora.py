"""DoRA: an adapter that sets the norms of a weight's rows or columns, m * V / |V| with V = W + delta.

https://arxiv.org/abs/2402.09353. PEFT stores a norm per row (output); LyCORIS per row or per column (input),
`wd_on_out`. Norms have the same bits on every machine: their sums are exact in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.sources.loras.layers import Layer, Magnitude, lora_delta
from sdflow.weights.half import add_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

_BLOCK = 1 << 18
"""Number of values processed at a time."""


def with_norms(values: NDArray[Any], layer: Layer, scale: float) -> Floats:
    """Return a weight with a DoRA merged at this scale."""
    magnitude = layer.magnitude
    assert magnitude is not None, "the layer is a DoRA's"
    blended = magnitude.blends and scale != 1
    merged = lora_delta(layer, values.shape, 1.0 if magnitude.blends else scale)
    add_to(merged, values)
    _set_norms(merged, magnitude)
    if blended:
        before = values.astype(np.float32)
        merged -= before
        merged *= np.float32(scale)
        merged += before
    return merged


def _set_norms(values: Floats, magnitude: Magnitude) -> None:
    """Set the norms in place. Rows or columns of zeros are unchanged."""
    rows = np.moveaxis(values, magnitude.axis, 0)
    found = norms(rows)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = np.where(found > 0, magnitude.values / found, np.float32(1))
    rows *= factors.reshape(-1, *[1] * (rows.ndim - 1))


def norms(rows: Floats) -> Floats:
    """Return the Euclidean norm of each entry along the first axis, rounded to float32 once."""
    width = max(1, rows[0].size)
    bits = (53 - (width - 1).bit_length()) // 2
    found = np.empty(len(rows), np.float32)
    step = max(1, _BLOCK // width)
    for begin in range(0, len(rows), step):
        exact = rows[begin : begin + step].reshape(-1, width).astype(np.float64)
        units = np.ldexp(1.0, np.frexp(np.abs(exact).max(axis=1))[1] - bits)[:, None]
        # Split each value into two integers short enough that sums of their squares are exact.
        with np.errstate(invalid="ignore", over="ignore"):
            exact /= units
            high = np.rint(exact)
            low = np.rint((exact - high) * 2.0**bits)
            squares = (high * high).sum(axis=1)
            squares += 2.0 ** (1 - bits) * (high * low).sum(axis=1)
            squares += 4.0**-bits * (low * low).sum(axis=1)
            found[begin : begin + step] = np.sqrt(squares) * units[:, 0]
    return found
