"""Rotations by Hadamard matrices: orthogonal, as scipy has them, and the same in recipes, on torch and in JSON."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from sdflow.weights.evaluate import evaluate
from sdflow.weights.hadamard import SIZES, matrix, rotated
from sdflow.weights.on_device import evaluate as on_torch
from sdflow.weights.recipe import Param, Quantized, Rotated, Transpose
from sdflow.weights.recipe_json import from_json, to_json


@pytest.mark.parametrize("size", SIZES)
def test_the_matrix_is_scipys_over_the_root_of_its_size(size: int) -> None:
    np.testing.assert_allclose(matrix(size), hadamard(size) / np.sqrt(size), rtol=1e-6)
    np.testing.assert_allclose(matrix(size).astype(np.float64) @ matrix(size), np.eye(size), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(1, 4), st.sampled_from(SIZES), st.integers(0, 1))
def test_values_are_multiplied_group_by_group(seed: int, rows: int, groups: int, size: int, axis: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, groups * size)).astype(np.float32)
    expected = (values.reshape(rows, groups, size).astype(np.float64) @ hadamard(size) / np.sqrt(size)).reshape(
        rows, -1
    )
    found = rotated(values if axis else values.T, axis, size)
    np.testing.assert_allclose(
        found if axis else found.T, expected, rtol=0, atol=2e-6 * np.abs(values).max() * size**0.5
    )


def test_a_single_large_value_is_spread() -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, 5] = 100
    np.testing.assert_allclose(np.abs(rotated(values, 1, 64)), 12.5)


def test_a_recipe_rotates_on_torch_too_and_survives_json() -> None:
    values = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    recipe = Rotated(0, 16, Transpose((1, 0), Param("w", (8, 32))))
    found = evaluate(recipe, {"w": values}.__getitem__)
    assert found.shape == recipe.shape == (32, 8)
    np.testing.assert_array_equal(found, rotated(values.T, 0, 16))
    same = on_torch(recipe, lambda leaf: torch.from_numpy(values), torch.device("cpu"))
    np.testing.assert_array_equal(same.numpy(), found)
    whole = Quantized("int8", 1, recipe)
    assert from_json(to_json(whole)) == whole


@pytest.mark.parametrize("changed", [{"rotated": 24}, {"rotated": 64}, {"axis": 2}, {"axis": -1}, {"rotated": [16]}])
def test_a_rotation_that_does_not_fit_is_refused(changed: dict[str, object]) -> None:
    right = to_json(Rotated(0, 16, Param("w", (32, 8))))
    with pytest.raises(ValueError, match="recipe"):
        from_json({**right, **changed})
