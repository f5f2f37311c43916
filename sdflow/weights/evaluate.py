"""Evaluate a recipe: the values of an initializer from those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sdflow.weights.blockwise import Lately, quantize
from sdflow.weights.hadamard import rotated
from sdflow.weights.half import AtLimit, numpy_type
from sdflow.weights.layout import Tile, contiguous, copy_into
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
    Shape,
    Sum,
    SumAlong,
    Transpose,
)

Tiles = Callable[[str, int, bool], Iterable[Tile]]
Empty = Callable[[Shape, np.dtype[Any]], Array]


def evaluate(
    recipe: Recipe,
    read: Callable[[str], Array],
    counts: AtLimit | None = None,
    tiles: Tiles | None = None,
    lately: Lately | None = None,
    empty: Empty = np.empty,
) -> Array:
    """Evaluate a recipe. `read` returns a parameter's values, float32 or, if stored so, float16.

    tiles: yields the same values, also bfloat16 if stored so, as tiles of a matrix with rows of the given width; the
    last argument says whether it is written transposed. Rounded parameters are read through it, so that none is ever
    whole in float32. lately: cache of blockwise quantized weights, whose parts are separate recipes; for a single `read`
    only. empty: allocates joined and rounded values.

    Rounding is applied first, at the leaves: it acts on single values, so it commutes with moving them, and only half
    as many bytes are moved. It does not commute with a sum, nor with scaling, which may make a value subnormal. The
    result may be a non-contiguous view. 16-bit values at the type's limits are added to `counts`. Raises ValueError for
    a parameter of another shape.
    """
    return _evaluate(recipe, _Source(read, tiles, counts, lately or Lately(), empty), None)


@dataclass(frozen=True)
class _Source:
    """Arguments of `evaluate`."""

    read: Callable[[str], Array]
    tiles: Tiles | None
    counts: AtLimit | None
    lately: Lately
    empty: Empty


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
    if isinstance(recipe, Join) or (rounding and isinstance(recipe, Transpose | Param) and source.tiles):
        whole = source.empty(recipe.shape, numpy_type(rounding.dtype if rounding else recipe.dtype))
        _fill(recipe, source, rounding, whole)
        return whole
    if isinstance(recipe, Transpose):
        return _evaluate(recipe.of, source, rounding).transpose(recipe.axes)
    if isinstance(recipe, Reshape):
        return contiguous(_evaluate(recipe.of, source, rounding)).reshape(recipe.shape)
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
    if isinstance(recipe, Constant):
        values = np.frombuffer(recipe.raw, recipe.dtype).reshape(recipe.shape)
    else:
        values = source.read(recipe.key)
        if values.shape != recipe.shape:
            raise ValueError(f"{recipe.key} has the shape {list(values.shape)}, not {list(recipe.shape)}")
    if rounding is not None:
        return rounding.round(values, source.counts)
    return values if values.dtype == recipe.dtype else values.astype(recipe.dtype)


def _fill(recipe: Recipe, source: _Source, rounding: Rounded | None, target: Array) -> None:
    """Evaluate a recipe into an array of its shape, which may be a view in any order."""
    if isinstance(recipe, Rounded):
        _fill(recipe.of, source, recipe, target)
    elif isinstance(recipe, Join):
        ends = np.cumsum([part.shape[recipe.axis] for part in recipe.parts])
        for part, place in zip(recipe.parts, np.split(target, ends[:-1], recipe.axis), strict=True):
            _fill(part, source, rounding, place)
    elif isinstance(recipe, Transpose):
        _fill(recipe.of, source, rounding, target.transpose(np.argsort(recipe.axes)))
    elif isinstance(recipe, Param) and rounding and source.tiles:
        if target.ndim == 2 or target.flags.c_contiguous:
            _fill_by_tile(recipe, source.tiles, rounding, source.counts, target)
        else:
            copy_into(target, _evaluate(recipe, source, rounding))
    else:
        copy_into(target, _evaluate(recipe, source, rounding))


def _fill_by_tile(param: Param, tiles: Tiles, rounding: Rounded, counts: AtLimit | None, target: Array) -> None:
    matrix = target if target.ndim == 2 else target.reshape(len(target) if target.ndim > 1 else 1, -1)
    done = 0
    for rows, columns, values in tiles(param.key, matrix.shape[1], matrix.strides[0] < matrix.strides[1]):
        place = matrix[rows, columns]
        if place.shape == values.shape:
            place[...] = rounding.round(np.ascontiguousarray(values), counts)
        done += values.size
    if done != target.size:
        raise ValueError(f"{param.key} has {done} values; the shape {list(param.shape)} takes {target.size}")


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
