"""A recipe gives what numpy gives, survives JSON, and one that does not fit together is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from sdflow.weights import layout
from sdflow.weights.evaluate import evaluate
from sdflow.weights.half import AtLimit, to_float16
from sdflow.weights.recipe import (
    Bfloat16,
    Constant,
    Float16,
    Join,
    Param,
    Quantized,
    Recipe,
    Reshape,
    Scaled,
    Scales,
    Sum,
    SumAlong,
    Transpose,
    params,
)
from sdflow.weights.recipe_json import from_json, to_json

W = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
PARAM = Param("w", (6, 4))
ZEROS = Constant(np.zeros((6, 4), np.float32).tobytes(), (6, 4), "float32")
HALF = Float16(5.96e-08, 65504.0, PARAM)
BRAIN = torch.from_numpy(np.concatenate([W, np.zeros_like(W)])).bfloat16().view(torch.uint16).numpy().view(bfloat16)
HALVES = to_float16(np.concatenate([W.reshape(4, 6), W.T]))
CASES: list[tuple[Recipe, Any]] = [
    (PARAM, W),
    (Transpose((1, 0), PARAM), W.T),
    (Reshape((3, 8), Transpose((1, 0), PARAM)), W.T.reshape(3, 8)),
    (Join(1, (PARAM, ZEROS, PARAM)), np.concatenate([W, np.zeros_like(W), W], 1)),
    (Bfloat16(Join(1, (Transpose((1, 0), PARAM), Transpose((1, 0), ZEROS)))), BRAIN.T),
    (Float16(5.96e-08, 65504.0, Join(0, (Reshape((4, 6), PARAM), Transpose((1, 0), PARAM)))), HALVES),
    (
        Float16(5.96e-08, 65504.0, Transpose((2, 0, 1), Param("w", (6, 2, 2)))),
        to_float16(W).reshape(6, 2, 2).transpose(2, 0, 1),
    ),
    (
        Float16(5.96e-08, 65504.0, Join(0, (Param("w", (24,)), Param("w", (24,))))),
        to_float16(np.tile(W.reshape(-1), 2)),
    ),
    (Float16(5.96e-08, 65504.0, Transpose((1, 0), PARAM)), to_float16(W.T)),
    (Float16(1e-3, 1.0, Join(0, (PARAM, ZEROS))), to_float16(np.concatenate([W, np.zeros_like(W)]), 1e-3, 1.0)),
    (Transpose((1, 0), Float16(5.96e-08, 65504.0, PARAM)), to_float16(W).T),
    (Bfloat16(Join(0, (PARAM, ZEROS))), BRAIN),
    (Transpose((1, 0), Bfloat16(Sum((PARAM, PARAM)))), (2 * BRAIN[:6]).T),
    (Sum((PARAM, PARAM, ZEROS)), W + W),
    (Float16(5.96e-08, 65504.0, Sum((PARAM, Sum((PARAM, PARAM))))), to_float16(W + (W + W))),
    (Sum((HALF, HALF, HALF)), (to_float16(W) * np.float32(3)).astype(np.float16)),
    (SumAlong(1, ((0,), (3, 1, 2), (1, 1)), PARAM), np.stack([W[:, 0], W[:, 3] + W[:, 1] + W[:, 2], 2 * W[:, 1]], 1)),
    (Float16(1e-3, 1.0, SumAlong(0, ((0, 5),), PARAM)), to_float16((W[0] + W[5])[None], 1e-3, 1.0)),
    (Transpose((1, 0), Scaled(-6, PARAM)), W.T / np.float32(64)),
    (Float16(5.96e-08, 65504.0, Scaled(3, Sum((PARAM, PARAM)))), 16 * to_float16(W)),
    (Scales("int8", 0, PARAM), np.abs(W).max(1) / np.float32(127)),
    (Quantized("int8", 0, PARAM), np.rint(W.T / (np.abs(W).max(1) / np.float32(127))).T.astype(np.int8)),
    (Scales("int8", 1, Join(1, (PARAM, ZEROS))), np.append(np.abs(W).max(0) / np.float32(127), np.ones(4, np.float32))),
    (Scales("int8_reduced", 1, Transpose((1, 0), PARAM)), np.abs(W).max(1) / np.float32(64)),
]


@pytest.mark.parametrize(("recipe", "expected"), CASES)
def test_a_recipe_gives_what_numpy_gives(recipe: Recipe, expected: np.ndarray) -> None:
    shape = next(params(recipe)).shape
    values = evaluate(recipe, lambda key: W.reshape(shape))
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape) == (np.dtype(recipe.dtype), recipe.shape)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("stored", [np.float32, np.float16, bfloat16])
@pytest.mark.parametrize("size", [1, 5, 24])
@pytest.mark.parametrize(("recipe", "_"), CASES)
def test_a_parameter_read_in_tiles_gives_the_same_bits(
    recipe: Recipe, _: np.ndarray, stored: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "VALUES", 6)
    monkeypatch.setattr(layout, "COLUMNS", 3)
    shape = next(params(recipe)).shape
    with np.errstate(over="ignore", invalid="ignore"):
        values = W.astype(stored)
        values[2, 1], values[3, 3] = np.inf, 1e30  # beyond float16
        blocks = [values.reshape(-1)[begin : begin + size] for begin in range(0, values.size, size)]
        exact, whole, by_tile = values.astype(np.float32).reshape(shape), AtLimit(), AtLimit()
        expected = evaluate(recipe, lambda key: exact, whole)
        found = evaluate(recipe, lambda key: exact, by_tile, lambda key, *how: layout.tiles(blocks, *how))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()
    assert by_tile == whole


@pytest.mark.parametrize("size", [23, 25])
def test_tiles_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"w has {size} values; the shape"):
        evaluate(HALF, lambda key: W, None, lambda key, *how: layout.tiles((np.zeros(size, np.float32),), *how))


@pytest.mark.parametrize("recipe", [recipe for recipe, _ in CASES])
def test_a_recipe_survives_json(recipe: Recipe) -> None:
    assert from_json(to_json(recipe)) == recipe


def test_a_checkpoint_in_float16_is_widened_where_the_graph_is_float32() -> None:
    half = W.astype(np.float16)
    np.testing.assert_array_equal(evaluate(PARAM, lambda key: half), half.astype(np.float32))
    np.testing.assert_array_equal(evaluate(Float16(5.96e-08, 65504.0, PARAM), lambda key: half), half)


def test_a_scaled_weight_is_rounded_as_the_weight_itself_unless_it_is_subnormal() -> None:
    values = np.concatenate([W, W * np.float32(2e-3)])
    half, power = Float16(5.96e-08, 65504.0, Scaled(-6, Param("w", (12, 4)))), np.float16(2.0**-6)
    found, plain = evaluate(half, lambda key: values), to_float16(values)
    normal = np.abs(values) * 2.0**-6 >= 2.0**-14
    assert 0 < np.count_nonzero(normal) < values.size
    np.testing.assert_array_equal(found[normal], plain[normal] * power)
    assert np.abs(found - values * 2.0**-6)[~normal].max() <= 2.0**-25, "half of what subnormal numbers are apart"


def test_the_parameters_of_a_recipe_are_found() -> None:
    recipe = Float16(5.96e-08, 65504.0, Join(0, (Param("a", (1, 2)), Reshape((1, 2), Param("b", (2,))))))
    assert [param.key for param in params(recipe)] == ["a", "b"]


def test_a_parameter_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w has the shape \[4, 6\], not \[6, 4\]"):
        evaluate(PARAM, lambda key: W.T)


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"param": "w"},
        {"param": "w", "shape": [2.5]},
        {"transpose": [0, 0], "of": to_json(PARAM)},
        {"reshape": [5, 5], "of": to_json(PARAM)},
        {"join": 2, "of": [to_json(PARAM)]},
        {"join": 0, "of": [to_json(PARAM), {"param": "v", "shape": [6, 5]}]},
        {"float16": [1e-7], "of": to_json(PARAM)},
        {"constant": "AAAA", "dtype": "float32", "shape": [2]},
        {"sum_along": 2, "groups": [[0]], "of": to_json(PARAM)},
        {"sum_along": 1, "groups": [[0], [4]], "of": to_json(PARAM)},
        {"sum_along": 1, "groups": [[0], []], "of": to_json(PARAM)},
        {"sum_along": 1, "groups": [], "of": to_json(PARAM)},
        {"sum_along": 1, "groups": [[0]], "of": to_json(HALF)},
        {"scaled": 0.5, "of": to_json(PARAM)},
        {"scaled": -6, "of": to_json(HALF)},
        {"rotate": 1, "of": to_json(PARAM)},
    ],
)
def test_a_damaged_recipe_is_refused(damaged: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"recipe|shape|base64|unpack"):
        from_json(damaged)
