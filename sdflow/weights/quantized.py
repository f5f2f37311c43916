"""Quantized weights: a scale per output channel, and the nearest multiples of it.

int8 equals `onnxruntime.quantization.quantize_dynamic` with signed per-channel weights bit for bit: symmetric, float32
scales, ties to even (quant_utils.py, compute_scale_zp and quantize_nparray).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Kind:
    """A quantization scheme. dtype: numpy name of the values' type.

    scales: maps float32 values and the output channel axis to float32 (channels,). quantize: maps values, scales and
    axis to values of `dtype`.
    """

    dtype: str
    scales: Callable[[Array, int], Array]
    quantize: Callable[[Array, Array, int], Array]


def largest_magnitudes(values: Array, axis: int) -> Array:
    """Return each channel's largest magnitude, float32; 0 for an empty channel."""
    others = tuple(index for index in range(values.ndim) if index != axis)
    found: Array = np.maximum.reduce(np.abs(values), axis=others, initial=0, dtype=np.float32)
    return found


def along(axis: int, ndim: int) -> tuple[int, ...]:
    """Return the shape that broadcasts one number per channel."""
    return tuple(-1 if index == axis else 1 for index in range(ndim))


def _whole_scales(largest: int, values: Array, axis: int) -> Array:
    scales = (largest_magnitudes(values, axis).astype(np.float64) / largest).astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 1  # a channel of zeros, or nearly
    return scales


def _whole(largest: int, values: Array, scales: Array, axis: int) -> Array:
    multiples = np.rint(values.astype(np.float32, copy=False) / scales.reshape(along(axis, values.ndim)))
    return np.clip(multiples, -largest, largest, out=multiples).astype(np.int8)


def _float8_scales(values: Array, axis: int) -> Array:
    scales = largest_magnitudes(values, axis) / np.float32(LARGEST_FLOAT8)
    scales[scales < np.finfo(np.float32).tiny] = 1
    return scales


def _float8(values: Array, scales: Array, axis: int) -> Array:
    import ml_dtypes

    quotients = values.astype(np.float32, copy=False) / scales.reshape(along(axis, values.ndim))
    made = np.empty_like(quotients, np.uint8)
    flat, result = quotients.ravel(order="K"), made.ravel(order="K")
    for start in range(0, flat.size, BLOCK):
        result[start : start + BLOCK] = float8_bits(flat[start : start + BLOCK])
    return made.view(ml_dtypes.float8_e4m3fn)


def float8_bits(values: Array) -> Array:
    """Convert a flat float32 array to E4M3 bits: to nearest, ties to even, clamped to 448.

    Same result as ml_dtypes, several times faster: E4M3 has 3 fraction bits, so the upper half of a float32, which has
    7, decides together with whether the lower half is nonzero.
    """
    halves = values.astype("<f4", copy=False).view("<u2").reshape(-1, 2)
    result: Array = _rounded_halves()[halves[:, 1] | (halves[:, 0] != 0)]
    return result


@cache
def _rounded_halves() -> Array:
    """Return a table from the upper 16 bits of a float32 to E4M3."""
    import ml_dtypes

    with np.errstate(invalid="ignore"):
        exact = np.clip((np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32), -LARGEST_FLOAT8, LARGEST_FLOAT8)
        bits: Array = exact.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return bits


BLOCK = 1 << 15
"""Number of values rounded at a time, which fit the processor's cache."""
LARGEST_FLOAT8 = 448
"""Maximum of E4M3: https://arxiv.org/abs/2209.05433."""

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "float8_e4m3": Kind("float8_e4m3fn", _float8_scales, _float8),
        "int8": Kind("int8", partial(_whole_scales, 127), partial(_whole, 127)),
        "int8_reduced": Kind("int8", partial(_whole_scales, 64), partial(_whole, 64)),
    }
)
"""Schemes by name, as in recipes. int8_reduced has a range short enough that processors without VNNI, which add two
products in 16 bits, do not saturate."""
