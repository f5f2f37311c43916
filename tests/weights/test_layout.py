"""Values in C order: numpy's own copies, only faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdflow.weights.layout import TILE, contiguous, joined

SIZES = [st.integers(0, 2 * side + 3) for side in TILE]


@given(rows=SIZES[0], columns=SIZES[1], step=st.sampled_from([1, 2, -1]))
def test_a_transposed_matrix_is_copied_as_numpy_copies_it(rows: int, columns: int, step: int) -> None:
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)[::step].T
    copied = contiguous(values)
    assert copied.flags.c_contiguous
    assert np.array_equal(copied, np.ascontiguousarray(values))


@pytest.mark.parametrize("axes", [(0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)])
def test_so_is_any_other_order_of_axes(axes: tuple[int, ...]) -> None:
    values = np.arange(3 * 4 * 5 * 6, dtype=np.float16).reshape(3, 4, 5, 6).transpose(axes)
    assert np.array_equal(contiguous(values), values)


def test_what_is_contiguous_is_not_copied() -> None:
    values = np.zeros((3, 4))
    assert contiguous(values) is values


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("types", [("f4", "f4"), ("f2", "f4")])
@pytest.mark.parametrize("turned", [(True, True), (True, False)])
def test_parts_are_joined_as_numpy_joins_them(axis: int, types: tuple[str, str], turned: tuple[bool, bool]) -> None:
    parts: list[Any] = [np.arange(140 * 140, dtype=kind).reshape(140, 140) for kind in types]
    parts = [part.T if turn else part for part, turn in zip(parts, turned, strict=True)]
    parts[1] = parts[1][:, :90] if axis else parts[1][:90]
    found, expected = joined(parts, axis), np.concatenate(parts, axis)
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


def test_vectors_and_kernels_are_joined_too() -> None:
    vectors = [np.arange(40, dtype=np.float16)[::2], np.arange(3, dtype=np.float16)]
    assert np.array_equal(joined(vectors, 0), np.concatenate(vectors))
    kernels = [np.arange(5 * 4 * 3 * 3, dtype=np.float32).reshape(5, 4, 3, 3).transpose(0, 2, 3, 1)] * 2
    assert np.array_equal(joined(kernels, 3), np.concatenate(kernels, 3))


def test_parts_that_do_not_fit_are_refused() -> None:
    turned = np.zeros((4, 3)).T
    with pytest.raises(ValueError, match="axis 0"):
        joined([turned, np.zeros((3, 1))], 0)
