"""Weights in 4 or 8 bits by blocks, in the format of com.microsoft's `MatMulNBits`.

A weight (N, K) is divided into blocks of `size` values along K. A value x is stored as the integer nearest to x / scale
+ zero, ties away from 0, in 0 to 2^bits - 1. For a block with minimum lo <= 0 and maximum hi >= 0:

    symmetric   zero = 2^(bits-1), scale = -far / zero, where far is the one of lo and hi farther from 0 (lo, if equal)
    otherwise   scale = (hi - lo) / (2^bits - 1), zero = -lo / scale to the nearest

The bytes equal those of onnxruntime.quantization.matmul_nbits_quantizer (onnxruntime/core/mlas/lib/q4_dq.cpp), computed
in float32, except that subnormal scales become 0; every value of such a block is then stored as its zero point.

`algorithm: mse` searches for scales with a smaller squared error, without calibration data: it tries the range lo to hi
times each of `SHRUNK`; ties keep the first. The scale is then the best fit for the stored numbers, sum(x m) / sum(m m)
with m = number - zero, and values are rounded once more. Sums are pairwise over halves of a block (first half plus
second, until one value is left), so any implementation with this order gives the same bits.

A scale is rounded to its stored type before values are divided by it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdflow.weights.half import numpy_type

Array = NDArray[Any]
Algorithm = Literal["rtn", "mse"]
Part = Literal["values", "scales", "zeros"]
PARTS: tuple[Part, ...] = ("values", "scales", "zeros")
BITS = (4, 8)
SIZES = (16, 32, 64, 128, 256)
SCALES = ("float32", "float16", "bfloat16")

SHRUNK = (1.0, 0.94, 0.88, 0.82, 0.76)
"""Fractions of a block's range to try, as float32."""

CHUNK = 1 << 15
"""Number of values quantized at a time, which fit the processor's cache."""
LARGE = 64
"""Number of chunks from which several threads pay off."""
THREADS = min(4, os.cpu_count() or 1)

_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Adding this to a non-negative number and truncating rounds to nearest, ties up. Adding 0.5 would round the number
just below it to 1."""


@dataclass(frozen=True)
class Format:
    """Storage of a weight. size: block size. scale: type of the scales."""

    bits: int
    size: int
    symmetric: bool
    algorithm: Algorithm
    scale: str

    @property
    def top(self) -> int:
        """Largest stored number."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def shape(self, part: Part, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of a part for a weight (rows, columns)."""
        blocks = columns // self.size
        if part == "values":
            return rows, blocks, self.size * self.bits // 8
        return rows, blocks if part == "scales" else -(-blocks * self.bits // 8)

    def dtype(self, part: Part) -> str:
        return self.scale if part == "scales" else "uint8"

    def fits(self) -> bool:
        """Whether the format is supported."""
        known = self.bits in BITS and self.size in SIZES and self.scale in SCALES
        return known and type(self.symmetric) is bool and self.algorithm in ("rtn", "mse")


class Blocks(NamedTuple):
    """A quantized weight: values (N, blocks, bytes), scales (N, blocks), zeros (N, bytes), as inputs of
    `MatMulNBits`."""

    values: Array
    scales: Array
    zeros: Array


def quantize(exact: Array, how: Format) -> Blocks:
    """Quantize float32 values (N, K); K is a multiple of `how.size`. Uses memory for the result and `CHUNK` values per
    thread."""
    rows, columns = exact.shape
    blocks = np.ascontiguousarray(exact, np.float32).reshape(-1, how.size)
    values = np.empty((len(blocks), how.size * how.bits // 8), np.uint8)
    scales, zeros = np.empty(len(blocks), numpy_type(how.scale)), np.empty(len(blocks), np.uint8)

    def fill(part: range) -> None:
        with np.errstate(all="ignore"):
            for begin in part:
                chunk = slice(begin, begin + part.step)
                scales[chunk], zeros[chunk], numbers = _chunk(blocks[chunk], how)
                values[chunk] = (numbers if how.bits == 8 else numbers[0::2] | numbers[1::2] << 4).T

    chunks = range(0, len(blocks), max(1, CHUNK // how.size))
    share = -(-len(chunks) // THREADS)
    if len(chunks) < LARGE:
        fill(chunks)
    else:  # the caller waits for the whole weight, so other cores are idle
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(fill, [chunks[begin : begin + share] for begin in range(0, len(chunks), share)]))
    shape = how.shape("values", rows, columns)
    return Blocks(values.reshape(shape), scales.reshape(shape[:2]), _packed_zeros(zeros.reshape(shape[:2]), how))


def _chunk(blocks: Array, how: Format) -> tuple[Array, Array, Array]:
    """Return stored scales, zeros, and numbers (size, blocks) of some blocks."""
    x = np.ascontiguousarray(blocks.T)  # a block's values in a column, one column per block
    scale, zero = _scales(x, how)
    scale[np.abs(scale) < np.finfo(np.float32).tiny] = 0
    stored = scale.astype(numpy_type(how.scale))
    return stored, zero, _numbers(x, stored.astype(np.float32), zero, how.top).astype(np.uint8)


def _packed_zeros(zeros: Array, how: Format) -> Array:
    if how.bits == 8:
        return zeros
    if zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)), constant_values=how.middle)
    packed: Array = zeros[:, 0::2] | zeros[:, 1::2] << 4
    return packed


def _scales(x: Array, how: Format) -> tuple[Array, Array]:
    """Return scales and zeros of blocks (size, blocks), both float32."""
    low, high = np.minimum(x.min(0), 0), np.maximum(x.max(0), 0)
    scale, zero = _of_range(low, high, how)
    if how.algorithm == "rtn":
        return scale, zero
    error = _error(x, scale, zero, how.top)
    for part in SHRUNK[1:]:
        tried = _of_range(low * np.float32(part), high * np.float32(part), how)
        found = _error(x, *tried, how.top)
        better = found < error
        np.copyto(error, found, where=better)
        np.copyto(scale, tried[0], where=better)
        np.copyto(zero, tried[1], where=better)
    numbers = _numbers(x, scale, zero, how.top)
    numbers -= zero
    squares = _added_up(numbers * numbers)
    numbers *= x
    np.copyto(scale, _added_up(numbers) / squares, where=squares > 0)
    return scale, zero


def _of_range(low: Array, high: Array, how: Format) -> tuple[Array, Array]:
    if how.symmetric:
        far = np.where(np.abs(high) > np.abs(low), high, low)
        return far / np.float32(-how.middle), np.full_like(far, how.middle)
    scale = (high - low) / np.float32(how.top)
    zero = np.where(scale != 0, -low / scale, 0)
    return scale, np.floor(np.clip(zero, 0, how.top) + _BELOW_HALF)


def _numbers(x: Array, scale: Array, zero: Array, top: int) -> Array:
    """Return the stored numbers of values, in float32."""
    numbers: Array = x * np.where(scale != 0, np.float32(1) / scale, np.float32(0))
    numbers += zero
    np.clip(numbers, 0, top, out=numbers)
    numbers += _BELOW_HALF
    np.floor(numbers, out=numbers)
    return numbers


def _error(x: Array, scale: Array, zero: Array, top: int) -> Array:
    numbers = _numbers(x, scale, zero, top)
    numbers -= zero
    numbers *= scale
    numbers -= x
    numbers *= numbers
    return _added_up(numbers)


def _added_up(values: Array) -> Array:
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    total: Array = values[0]
    return total


class Lately:
    """Cache of recently quantized weights, whose values, scales and zeros are requested one after the other or by
    several threads at once."""

    KEPT = 6

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: OrderedDict[Any, Future[Blocks]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Blocks]) -> Blocks:
        """Return the cached result for the key, or that of `make`, which is called once."""
        with self._lock:
            known = self._found.get(key)
            found = known or self._found.setdefault(key, Future())
            while len(self._found) > self.KEPT:
                self._found.popitem(last=False)
        if known is None:
            try:
                found.set_result(make())
            except BaseException as error:
                found.set_exception(error)
                raise
        return found.result()
