"""Rounding to float16 gives the bits that ONNX Runtime's converter gives."""

from __future__ import annotations

import numpy as np
import pytest

from sdflow.weights.half import _BLOCK, _RUN, AtLimit, to_float16

EDGES = np.array(
    [0, 5.96e-08, 5.9604645e-08, 6e-08, 1e-08, 2**-24, 2**-25, 2**-26, 1e-45, 6.1e-05, 2**-14, 65503, 65504, 65519.99,
     65520, 65535, 1e5, 3.4e38, np.inf],
    np.float32,
)  # fmt: skip


def any_floats() -> np.ndarray:
    """float32 of every exponent, in equal parts, and the edges with both signs."""
    bits = np.random.default_rng(0).integers(0, 2**32, 600_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([EDGES, -EDGES, bits])
    return values[~np.isnan(values)]


@pytest.mark.parametrize("limits", [(5.96e-08, 65504.0), (1e-07, 1e4), (1e-3, 1.0)])
def test_every_value_is_rounded_as_onnxruntime_rounds_it(limits: tuple[float, float]) -> None:
    from onnxruntime.transformers.float16 import convert_np_to_float16

    values = any_floats()
    expected = convert_np_to_float16(values, *limits)
    np.testing.assert_array_equal(to_float16(values, *limits).view(np.uint16), expected.view(np.uint16))


def test_nan_is_rounded_as_onnxruntime_rounds_it() -> None:
    from onnxruntime.transformers.float16 import convert_np_to_float16

    values = np.array([np.nan, -np.nan, 1.0], np.float32)
    assert np.array_equal(to_float16(values).view(np.uint16), convert_np_to_float16(values.copy()).view(np.uint16))


def test_shape_and_views_are_respected() -> None:
    values = any_floats()[:60_000].reshape(20, 30, 100).transpose(2, 0, 1)
    with np.errstate(over="ignore"):
        plain = values.astype(np.float16)
    rounded = to_float16(values)
    assert rounded.shape == plain.shape
    inside = (np.abs(values) > 1e-7) & (np.abs(values) < 65000)
    np.testing.assert_array_equal(rounded[inside], plain[inside])


def test_float16_comes_back_as_it_is() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(to_float16(every.view(np.float16)).view(np.uint16), every)


def test_float16_is_held_to_narrower_limits() -> None:
    values = np.array([1e-7, 2.0, -9.0], np.float16)
    np.testing.assert_array_equal(to_float16(values, 1e-3, 3.0), np.array([1e-3, 2.0, -3.0], np.float16))


def test_values_at_the_limits_are_counted() -> None:
    counts = AtLimit()
    to_float16(np.array([1e-9, -1e-9, 0, 1, 7e4, 65504, np.inf], np.float32), counts=counts)
    to_float16(np.array([2**-24, 65504, -65504], np.float16), counts=counts)
    assert counts == AtLimit(largest=4, smallest=3, cut=1, not_finite=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_value_at_a_limit_is_found_wherever_it_stands(dtype: type) -> None:
    """In the first and the last place of a run, of a block and of what is left over, with none beside it."""
    size = 2 * _BLOCK + 2 * _RUN + 7
    places = [0, _RUN - 1, _RUN, _BLOCK - 1, _BLOCK, 2 * _BLOCK + _RUN, size - 7, size - 1]
    values = np.full(size, 0.5, dtype)
    values[places] = [65504, 2**-24, -65504, -(2**-24), 65504, 65504, -(2**-24), 65504]
    counts = AtLimit()
    rounded = to_float16(values, counts=counts)
    assert counts == AtLimit(largest=5, smallest=3)
    narrowed = to_float16(values, 1e-3, 2.0)
    assert np.array_equal(np.flatnonzero(rounded != np.float16(0.5)), places)
    assert np.array_equal(narrowed[places], np.array([2, 1e-3, -2, -1e-3, 2, 2, -1e-3, 2], np.float16))
