"""Weights in few bits: a scale for each output channel, and values that are the nearest multiples of it.

int8 is that of `onnxruntime.quantization.quantize_dynamic` with signed weights per channel, bit for bit: symmetric, the scale in
float32, halves to even (quant_utils.py, compute_scale_zp and quantize_nparray).
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
    """A way to quantize. dtype: of the values, as numpy names it.

    scales: from float32 values and the axis of their output channels to float32 (channels,). quantize: from values, scales and
    axis to values of `dtype`.
    """

    dtype: str
    scales: Callable[[Array, int], Array]
    quantize: Callable[[Array, Array, int], Array]


def largest_magnitudes(values: Array, axis: int) -> Array:
    """Of each channel, float32; 0 of one without values."""
    others = tuple(index for index in range(values.ndim) if index != axis)
    found: Array = np.maximum.reduce(np.abs(values), axis=others, initial=0, dtype=np.float32)
    return found


def along(axis: int, ndim: int) -> tuple[int, ...]:
    """The shape that puts one number for each channel beside values."""
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
    """float32 values, one after the other, as bits of E4M3: rounded to nearest, halves to even, cut at 448.

    What ml_dtypes gives, several times as fast: E4M3 has 3 bits of fraction, so that the upper half of a float32, with 7, decides
    together with whether anything follows.
    """
    halves = values.astype("<f4", copy=False).view("<u2").reshape(-1, 2)
    result: Array = _rounded_halves()[halves[:, 1] | (halves[:, 0] != 0)]
    return result


@cache
def _rounded_halves() -> Array:
    """The upper 16 bits of a float32 -> E4M3."""
    import ml_dtypes

    with np.errstate(invalid="ignore"):
        exact = np.clip((np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32), -LARGEST_FLOAT8, LARGEST_FLOAT8)
        bits: Array = exact.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return bits


BLOCK = 1 << 15
"""Values that are rounded at a time, while they are in the processor's cache."""
LARGEST_FLOAT8 = 448
"""Of E4M3: https://arxiv.org/abs/2209.05433."""

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "float8_e4m3": Kind("float8_e4m3fn", _float8_scales, _float8),
        "int8": Kind("int8", partial(_whole_scales, 127), partial(_whole, 127)),
        "int8_reduced": Kind("int8", partial(_whole_scales, 64), partial(_whole, 64)),
    }
)
"""By name, as recipes write it. int8_reduced: a range so short that a processor without VNNI, which adds two products up in 16
bits, loses nothing."""
