"""Weights in 4 or 8 bits by blocks, as `MatMulNBits` of com.microsoft reads them.

A weight (N, K) is cut into blocks of `size` values along K. A value x of a block is stored as the whole number nearest to
x / scale + zero, halves away from 0, from 0 to 2^bits - 1. Of a block whose least and greatest values are lo <= 0 <= hi:

    symmetric   zero = 2^(bits-1), scale = -far / zero, where far is that of lo and hi that is farther from 0 (lo, if equal)
    otherwise   scale = (hi - lo) / (2^bits - 1), zero = -lo / scale to the nearest

These are the bytes of onnxruntime.quantization.matmul_nbits_quantizer (onnxruntime/core/mlas/lib/q4_dq.cpp), all in float32;
but a scale below float32's normal numbers is 0, and then all that is stored is the zero.

`algorithm: mse` looks for scales with a smaller squared error, and needs no images: the range, lo to hi, is tried times each of
`SHRUNK`, and of equal errors the first one stays. The scale then becomes that which fits the numbers stored so far best,
sum(x m) / sum(m m) with m = number - zero, and values are rounded once more. Sums are over halves of a block: the first half
plus the second, until one value is left, so that whoever adds up in that order has the same bits.

A scale is rounded to the type that it is stored in before values are divided by it.
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
"""Parts of a block's range, as float32."""

CHUNK = 1 << 15
"""Values that are quantized at a time, while they are in the processor's cache."""
LARGE = 64
"""Chunks from which on several threads are worth it."""
THREADS = min(4, os.cpu_count() or 1)

_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Added to a number that is not negative and then cut off: what rounds to nearest, halves up. 0.5 itself would round the
number just below it to 1."""


@dataclass(frozen=True)
class Format:
    """How a weight is stored. size: values of a block. scale: the type of the scales."""

    bits: int
    size: int
    symmetric: bool
    algorithm: Algorithm
    scale: str

    @property
    def top(self) -> int:
        """The largest number."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def shape(self, part: Part, rows: int, columns: int) -> tuple[int, ...]:
        """Of a part of a weight (rows, columns)."""
        blocks = columns // self.size
        if part == "values":
            return rows, blocks, self.size * self.bits // 8
        return rows, blocks if part == "scales" else -(-blocks * self.bits // 8)

    def dtype(self, part: Part) -> str:
        return self.scale if part == "scales" else "uint8"

    def fits(self) -> bool:
        """Whether it is one that there is."""
        known = self.bits in BITS and self.size in SIZES and self.scale in SCALES
        return known and type(self.symmetric) is bool and self.algorithm in ("rtn", "mse")


class Blocks(NamedTuple):
    """A quantized weight: values (N, blocks, bytes), scales (N, blocks), zeros (N, bytes) as `MatMulNBits` takes them."""

    values: Array
    scales: Array
    zeros: Array


def quantize(exact: Array, how: Format) -> Blocks:
    """Quantize float32 values (N, K). K is a multiple of `how.size`. Memory: the result, and `CHUNK` values for each thread."""
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
    else:  # who asks for the scales waits for the values: the other cores are free
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(fill, [chunks[begin : begin + share] for begin in range(0, len(chunks), share)]))
    shape = how.shape("values", rows, columns)
    return Blocks(values.reshape(shape), scales.reshape(shape[:2]), _packed_zeros(zeros.reshape(shape[:2]), how))


def _chunk(blocks: Array, how: Format) -> tuple[Array, Array, Array]:
    """Scales as they are stored, zeros, and numbers (size, blocks) of some blocks."""
    x = np.ascontiguousarray(blocks.T)  # a block's values under each other: one number for each block beside
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
    """Scales and zeros of blocks (size, blocks), both float32."""
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
    """What values are stored as, in float32."""
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
    """Weights that were quantized lately, as values, scales and zeros are asked for one after the other, or at once by several
    threads."""

    KEPT = 6

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: OrderedDict[Any, Future[Blocks]] = OrderedDict()

    def get(self, key: Any, make: Callable[[], Blocks]) -> Blocks:
        """What was made for the key, or what `make` gives; it is called once."""
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
