"""Values in C order: numpy's own copies, only faster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdflow.weights.layout import TILE, contiguous, copy_into

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


@given(rows=SIZES[0], columns=SIZES[1])
def test_into_a_transposed_matrix_too(rows: int, columns: int) -> None:
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    target = np.empty((columns, rows), np.float32).T
    copy_into(target, values)
    assert np.array_equal(target, values)
