"""Evaluate recipes without their roundings, and round the result with torch.

Rounding commutes with operations that only move values. So a recipe is evaluated once in float32 and its result rounded
here, independently of the code under test (`sdflow.weights.half`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdflow.weights.evaluate import evaluate
from sdflow.weights.recipe import (
    Bfloat16,
    Constant,
    Float16,
    Join,
    Quantizing,
    Recipe,
    Reshape,
    Rotated,
    Scaled,
    Sum,
    Transpose,
)

BFLOAT16 = (0.0, float("inf"))
"""Limits of a rounding to bfloat16: none."""


def unrounded_values(recipe: Recipe, read: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
    """Evaluate a recipe in float32 without its roundings; for a quantizing one, its input."""
    of = recipe.of if isinstance(recipe, Quantizing) else recipe
    values = evaluate(unrounded(of), read)
    if values.dtype == np.float32 and not values.flags.c_contiguous:
        import torch

        values = torch.from_numpy(values).contiguous().numpy()  # transposed in a quarter of numpy's time
    return np.ascontiguousarray(values)


def rounding_of(
    recipe: Recipe, exact: NDArray[Any], read: Callable[[str], NDArray[Any]]
) -> tuple[NDArray[Any], Callable[[NDArray[Any]], NDArray[Any]]]:
    """The values to store, and the function that rounds them."""
    limits = _limits(recipe)
    if limits == {None}:
        return exact, unchanged
    if len(limits) != 1:  # rounded in some parts only: cannot be separated
        return np.ascontiguousarray(evaluate(recipe, read)), unchanged
    (pair,) = limits
    assert pair is not None
    return exact, as_bfloat16 if pair == BFLOAT16 else partial(rounded, smallest=pair[0], largest=pair[1])


def unchanged(values: NDArray[Any]) -> NDArray[Any]:
    return values


def unrounded(recipe: Recipe) -> Recipe:
    """The recipe without its roundings, in float32 throughout."""
    match recipe:
        case Float16() | Bfloat16():
            return unrounded(recipe.of)
        case Transpose():
            return Transpose(recipe.axes, unrounded(recipe.of))
        case Reshape():
            return Reshape(recipe.shape, unrounded(recipe.of))
        case Join():
            return Join(recipe.axis, tuple(unrounded(part) for part in recipe.parts))
        case Sum():
            return Sum(tuple(unrounded(part) for part in recipe.parts))
        case Scaled():
            return Scaled(recipe.power, unrounded(recipe.of))
        case Rotated():
            return Rotated(recipe.axis, recipe.size, unrounded(recipe.of))
        case Constant(dtype="float16"):
            wide = np.frombuffer(recipe.raw, "<f2").astype("<f4")
            return Constant(wide.tobytes(), recipe.shape, "float32")
    return recipe


def rounds(recipe: Recipe) -> bool:
    """Whether a recipe rounds values to 16 bits."""
    return _limits(recipe) != {None}


def _limits(recipe: Recipe) -> set[tuple[float, float] | None]:
    """The limits of the roundings that the values pass; None for values that pass none."""
    match recipe:
        case Bfloat16():
            return {BFLOAT16, *(_limits(recipe.of) - {None})}
        case Float16():
            return {(recipe.smallest, recipe.largest), *(_limits(recipe.of) - {None})}
        case Transpose() | Reshape():
            return _limits(recipe.of)
        case Join():
            return {limits for part in recipe.parts for limits in _limits(part)}
        case Sum():
            inner = {limits for part in recipe.parts for limits in _limits(part)} - {None}
            return {None, *inner}
        case Constant(dtype="float16"):
            return set()
    return {None}


def as_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    """Round to bfloat16, as uint16, since numpy lacks the type."""
    import torch

    bits: NDArray[Any] = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    return bits


def rounded(values: NDArray[Any], smallest: float, largest: float) -> NDArray[Any]:
    """Round to float16; values beyond the limits become the limits, except 0 and non-finite ones."""
    import torch

    half: NDArray[Any] = torch.from_numpy(values).half().numpy()
    # Rounding is monotonic: values beyond a limit round to it or beyond.
    low, high = (int(np.float16(limit).view(np.uint16)) for limit in (smallest, largest))
    size = half.view(np.uint16).reshape(-1) & np.uint16(0x7FFF)
    suspects = np.flatnonzero((size <= low) | (size >= high))
    exact = values.reshape(-1)[suspects]
    magnitude = np.abs(exact)
    for limit, beyond in ((largest, magnitude > np.float32(largest)), (smallest, magnitude < np.float32(smallest))):
        changed = beyond & (magnitude > 0) & np.isfinite(magnitude)
        half.reshape(-1)[suspects[changed]] = np.copysign(np.float16(limit), exact[changed])
    return half
