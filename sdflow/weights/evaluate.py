"""Evaluate a recipe: the values of an initializer from those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from sdflow.weights.blockwise import Lately, quantize
from sdflow.weights.hadamard import rotated
from sdflow.weights.half import AtLimit, numpy_type
from sdflow.weights.layout import contiguous, joined
from sdflow.weights.quantized import KINDS
from sdflow.weights.recipe import (
    Array,
    Blockwise,
    Constant,
    Join,
    Param,
    Quantized,
    Recipe,
    Reshape,
    Rotated,
    Rounded,
    Scaled,
    Scales,
    Sum,
    SumAlong,
    Transpose,
)

Blocks = Callable[[str], Iterable[Array]]


def evaluate(
    recipe: Recipe,
    read: Callable[[str], Array],
    counts: AtLimit | None = None,
    blocks: Blocks | None = None,
    lately: Lately | None = None,
) -> Array:
    """Evaluate a recipe. `read` returns a parameter's values, float32 or, if stored so, float16.

    blocks: yields the same values in row-major order as flat blocks, also bfloat16 if stored so. Rounded parameters are
    read through it, so that none is ever whole in float32. lately: cache of blockwise quantized weights, whose parts
    are separate recipes; for a single `read` only.

    Rounding is applied first, at the leaves: it acts on single values, so it commutes with moving them, and only half
    as many bytes are moved. It does not commute with a sum, nor with scaling, which may make a value subnormal. The
    result may be a non-contiguous view. 16-bit values at the type's limits are added to `counts`. Raises ValueError for
    a parameter of another shape.
    """
    return _evaluate(recipe, _Source(read, blocks, counts, lately or Lately()), None)


@dataclass(frozen=True)
class _Source:
    """Arguments of `evaluate`."""

    read: Callable[[str], Array]
    blocks: Blocks | None
    counts: AtLimit | None
    lately: Lately


def _evaluate(recipe: Recipe, source: _Source, rounding: Rounded | None) -> Array:
    if isinstance(recipe, Rounded):
        return _evaluate(recipe.of, source, recipe)
    if isinstance(recipe, Quantized | Scales):
        kind, exact = KINDS[recipe.kind], _evaluate(recipe.of, replace(source, counts=None), None)
        scales = kind.scales(exact, recipe.axis)
        return scales if isinstance(recipe, Scales) else kind.quantize(exact, scales, recipe.axis)
    if isinstance(recipe, Blockwise):
        how, of, exactly = recipe.how, recipe.of, replace(source, counts=None)
        found = source.lately.get((how, of), lambda: quantize(_evaluate(of, exactly, None), how))
        values: Array = getattr(found, recipe.part)
        if source.counts is not None and recipe.part == "scales":
            source.counts.not_finite += int(np.count_nonzero(~np.isfinite(values.astype(np.float32))))
        return values
    if isinstance(recipe, Transpose):
        return _evaluate(recipe.of, source, rounding).transpose(recipe.axes)
    if isinstance(recipe, Reshape):
        return contiguous(_evaluate(recipe.of, source, rounding)).reshape(recipe.shape)
    if isinstance(recipe, Join):
        return joined([_evaluate(part, source, rounding) for part in recipe.parts], recipe.axis)
    if isinstance(recipe, Sum | SumAlong | Scaled | Rotated):
        exactly = replace(source, counts=None)
        if isinstance(recipe, Rotated):
            total = rotated(_evaluate(recipe.of, exactly, None), recipe.axis, recipe.size)
        elif isinstance(recipe, Scaled):
            total = scaled(_evaluate(recipe.of, exactly, None), recipe.power)
        elif isinstance(recipe, Sum):
            total = add_up([_evaluate(part, exactly, None) for part in recipe.parts])
        else:
            total = add_along(_evaluate(recipe.of, exactly, None), recipe.axis, recipe.groups)
        return rounding.round(total, source.counts) if rounding else total
    if isinstance(recipe, Param) and rounding is not None and source.blocks is not None:
        return _rounded(recipe, source.blocks(recipe.key), rounding, source.counts)
    if isinstance(recipe, Constant):
        values = np.frombuffer(recipe.raw, recipe.dtype).reshape(recipe.shape)
    else:
        values = source.read(recipe.key)
        if values.shape != recipe.shape:
            raise ValueError(f"{recipe.key} has the shape {list(values.shape)}, not {list(recipe.shape)}")
    if rounding is not None:
        return rounding.round(values, source.counts)
    return values if values.dtype == recipe.dtype else values.astype(recipe.dtype)


def _rounded(param: Param, blocks: Iterable[Array], rounding: Rounded, counts: AtLimit | None) -> Array:
    values, done = np.empty(prod(param.shape), numpy_type(rounding.dtype)), 0
    for block in blocks:
        if done + block.size <= values.size:
            values[done : done + block.size] = rounding.round(block, counts)
        done += block.size
    if done != values.size:
        raise ValueError(f"{param.key} has {done} values; the shape {list(param.shape)} takes {values.size}")
    return values.reshape(param.shape)


def add_up(parts: Sequence[Array]) -> Array:
    """Add arrays of one shape and type in float32, from left to right, and round to that type at the end."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part
    return total.astype(parts[0].dtype, copy=False)


def scaled(values: Array, power: int) -> Array:
    """Compute `Scaled` for float32 values."""
    return values * np.float32(2.0**power)


def add_along(values: Array, axis: int, groups: Sequence[Sequence[int]]) -> Array:
    """Compute `SumAlong` for float32 values."""
    return np.stack([add_up([values.take(entry, axis) for entry in group]) for group in groups], axis)
