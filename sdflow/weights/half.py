"""Round float32 to float16 like ONNX Runtime's converter, but a hundred times faster; and to bfloat16.

`convert_np_to_float16` in onnxruntime/transformers/float16.py makes a dozen passes over all values. Here the few values
that its limits change are found among the rounded ones: rounding is monotonic, so values beyond a limit round to the
limit's float16 or beyond. numpy's cast processes one value at a time (0.4 GB/s); the kernel of ONNX Runtime's Cast uses
vector instructions (2 to 11 GB/s), with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST = 5.96e-08
LARGEST = 65504.0

_BLOCK = 1 << 18  # values rounded at a time, which fit the processor's cache
_RUN = 1 << 10  # values whose maximum is found first: most runs have none at a limit
_SIGN = np.uint16(0x8000)
_MAGNITUDE = np.uint16(0x7FFF)
_INFINITE = np.uint16(0x7F80)  # the exponent of bfloat16's infinities and NaN


@dataclass
class AtLimit:
    """Counts of float16 values with the largest and with the smallest finite magnitude, of values clamped to a limit,
    and of non-finite values."""

    largest: int = 0
    smallest: int = 0
    cut: int = 0
    not_finite: int = 0


def to_float16(
    values: NDArray[Any], smallest: float = SMALLEST, largest: float = LARGEST, counts: AtLimit | None = None
) -> NDArray[np.float16]:
    """Round to the nearest float16, ties to even, C-contiguous; see `sdflow.weights.recipe.Float16` for the limits.

    0, infinities and NaN are unchanged, and so are float16 values under the default limits. Values at float16's limits
    are added to `counts`.
    """
    as_they_are = values.dtype == np.float16 and smallest <= SMALLEST and largest >= LARGEST
    exact = np.ascontiguousarray(values if as_they_are else widened(values)).reshape(-1)
    if as_they_are and counts is None:
        return exact.reshape(values.shape)
    rounded = exact if as_they_are else np.empty(exact.size, np.float16)
    bits = rounded.view(np.uint16)
    low, high = (int(np.float16(limit).view(np.uint16)) for limit in (smallest, largest))
    inside = np.uint16(2 * (high - low - 1))
    doubled = np.empty(min(_BLOCK, exact.size), np.uint16)
    for begin in range(0, exact.size, _BLOCK):
        block, half = exact[begin : begin + _BLOCK], bits[begin : begin + _BLOCK]
        if not as_they_are:
            _cast(block, half)
        # Doubling the bits drops the sign. Subtracting the lower limit with wraparound lets one unsigned comparison
        # find both ends.
        distance = np.add(half, half, out=doubled[: half.size])
        distance -= np.uint16(2 * (low + 1))
        suspects = _at_least(inside, distance)
        if suspects.size:
            if not as_they_are:
                half[suspects] = _within_limits(block[suspects], half[suspects], smallest, largest)
            if counts is not None:
                magnitudes = half[suspects] & _MAGNITUDE
                counts.largest += int(np.count_nonzero(magnitudes == 0x7BFF))
                counts.smallest += int(np.count_nonzero(magnitudes == 0x0001))
                counts.not_finite += int(np.count_nonzero(magnitudes > 0x7BFF))
                exactly = np.abs(block[suspects])
                counts.cut += int(np.count_nonzero((exactly > LARGEST) & (exactly < np.inf)))
    return rounded.reshape(values.shape)


def to_bfloat16(values: NDArray[Any], counts: AtLimit | None = None) -> NDArray[Any]:
    """Round to the nearest bfloat16, ties to even. bfloat16 values are unchanged.

    Non-finite values are added to `counts`; bfloat16 has float32's range.
    """
    rounded = values.astype(numpy_type("bfloat16"), copy=False)
    if counts is not None:
        counts.not_finite += _not_finite(np.ascontiguousarray(rounded).view(np.uint16).reshape(-1))
    return rounded


def numpy_type(name: str) -> np.dtype[Any]:
    """Return NumPy's type of this name; for `bfloat16`, which NumPy lacks, that of ml_dtypes."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return found


def widened(values: NDArray[Any]) -> NDArray[np.float32]:
    """Convert to float32; bfloat16 by its bits, twice as fast as ml_dtypes' cast."""
    if values.dtype.name != "bfloat16":
        return np.asarray(values, np.float32)
    wide = values.view(np.uint16).astype(np.uint32)
    wide <<= np.uint32(16)  # the upper half of float32
    return wide.view(np.float32)


def _not_finite(bits: NDArray[np.uint16]) -> int:
    """Count infinite and NaN bfloat16 values; fast if there are none."""
    if not bits.size or (bits.max() < _SIGN | _INFINITE and bits.view(np.int16).max() < _INFINITE):
        return 0  # the largest of unsigned numbers is negative, and of signed ones positive
    return int(np.count_nonzero(bits & _MAGNITUDE >= _INFINITE))


def _at_least(limit: np.uint16, values: NDArray[np.uint16]) -> NDArray[np.intp]:
    """Return the indices of values that reach a limit; fast if there are none, or few."""
    if values.max() < limit:
        return np.empty(0, np.intp)
    farthest = np.maximum.reduceat(values, np.arange(0, values.size, _RUN))
    runs = np.flatnonzero(farthest >= limit)
    if 8 * runs.size > farthest.size:
        return np.flatnonzero(values >= limit)
    found = [run * _RUN + np.flatnonzero(values[run * _RUN : (run + 1) * _RUN] >= limit) for run in runs]
    return np.concatenate(found) if found else runs


def _within_limits(
    exact: NDArray[np.float32], bits: NDArray[np.uint16], smallest: float, largest: float
) -> NDArray[np.uint16]:
    magnitude = np.abs(exact)
    low, high = (np.float16(limit).view(np.uint16) for limit in (smallest, largest))
    small = (magnitude > 0) & (magnitude < np.float32(smallest))
    large = (magnitude > np.float32(largest)) & (magnitude < np.inf)
    magnitudes: NDArray[np.uint16] = np.where(small, low, np.where(large, high, bits & _MAGNITUDE))
    return (bits & _SIGN) | magnitudes


def add_to(total: NDArray[np.float32], values: NDArray[Any]) -> None:
    """Compute `total += values` for equal shapes; total is C-contiguous.

    numpy widens float16 one value at a time, which costs more than computing a LoRA's delta.
    """
    if values.dtype != np.float16:
        total += widened(values)
        return
    sums, halves = total.reshape(-1), np.ascontiguousarray(values).reshape(-1)
    wide = np.empty(min(_BLOCK, sums.size), np.float32)
    for begin in range(0, sums.size, _BLOCK):
        block = halves[begin : begin + _BLOCK]
        exact = wide[: block.size]
        _cast(block, exact)
        sums[begin : begin + _BLOCK] += exact


def _cast(values: NDArray[Any], into: NDArray[Any]) -> None:
    """Cast float32 to float16 (possibly viewed as uint16), or float16 to float32; both contiguous and of one length."""
    narrows = values.dtype == np.float32
    types = (np.float32, np.float16) if narrows else (np.float16, np.float32)
    binding = (session := _cast_session(narrows)).io_binding()
    binding.bind_input("x", "cpu", 0, types[0], [values.size], values.ctypes.data)
    binding.bind_output("y", "cpu", 0, types[1], [into.size], into.ctypes.data)
    session.run_with_iobinding(binding)


@cache
def _cast_session(narrows: bool) -> Any:
    import onnx
    import onnxruntime

    helper, kinds = onnx.helper, (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    before, after = kinds if narrows else kinds[::-1]
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=after)],
        "cast",
        [helper.make_tensor_value_info("x", before, ["n"])],
        [helper.make_tensor_value_info("y", after, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the caller's threads process one tensor each
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
