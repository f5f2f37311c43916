"""A recipe (`sdflow.weights.recipe`) as JSON:

{"float16": [5.96e-08, 65504.0], "of": {"transpose": [0, 2, 3, 1], "of": {"param": "conv_in.weight", ...}}}
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from math import prod
from typing import Any

import numpy as np

from sdflow.weights.blockwise import PARTS, Format
from sdflow.weights.hadamard import SIZES
from sdflow.weights.quantized import KINDS
from sdflow.weights.recipe import (
    Bfloat16,
    Blockwise,
    Constant,
    Float16,
    Join,
    Param,
    Quantized,
    Recipe,
    Reshape,
    Rotated,
    Scaled,
    Scales,
    Shape,
    Sum,
    SumAlong,
    Transpose,
)  # fmt: skip


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to JSON."""
    if isinstance(recipe, Param):
        return {"param": recipe.key, "shape": list(recipe.shape)}
    if isinstance(recipe, Constant):
        raw = base64.b64encode(recipe.raw).decode()
        return {"constant": raw, "dtype": recipe.dtype, "shape": list(recipe.shape)}
    if isinstance(recipe, Transpose):
        return {"transpose": list(recipe.axes), "of": to_json(recipe.of)}
    if isinstance(recipe, Reshape):
        return {"reshape": list(recipe.shape), "of": to_json(recipe.of)}
    if isinstance(recipe, Join):
        return {"join": recipe.axis, "of": [to_json(part) for part in recipe.parts]}
    if isinstance(recipe, Sum):
        return {"sum": [to_json(part) for part in recipe.parts]}
    if isinstance(recipe, SumAlong):
        groups = [list(group) for group in recipe.groups]
        return {"sum_along": recipe.axis, "groups": groups, "of": to_json(recipe.of)}
    if isinstance(recipe, Scaled):
        return {"scaled": recipe.power, "of": to_json(recipe.of)}
    if isinstance(recipe, Rotated):
        return {"rotated": recipe.size, "axis": recipe.axis, "of": to_json(recipe.of)}
    if isinstance(recipe, Quantized | Scales):
        what = "quantized" if isinstance(recipe, Quantized) else "scales"
        return {what: recipe.kind, "axis": recipe.axis, "of": to_json(recipe.of)}
    if isinstance(recipe, Blockwise):
        return {"blockwise": recipe.part, **asdict(recipe.how), "of": to_json(recipe.of)}
    if isinstance(recipe, Bfloat16):
        return {"bfloat16": True, "of": to_json(recipe.of)}
    return {"float16": [recipe.smallest, recipe.largest], "of": to_json(recipe.of)}


def from_json(value: Mapping[str, Any]) -> Recipe:
    """Parse a recipe written by `to_json`. Raises ValueError if it is not one, or its shapes are inconsistent."""
    try:
        recipe = _parse(value)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"not a recipe: {value!r}") from error
    return recipe


def _parse(value: Mapping[str, Any]) -> Recipe:
    if "param" in value:
        return Param(str(value["param"]), _shape(value["shape"]))
    if "constant" in value:
        constant = Constant(base64.b64decode(value["constant"], validate=True), _shape(value["shape"]), value["dtype"])
        _require(len(constant.raw) == prod(constant.shape) * np.dtype(constant.dtype).itemsize, value)
        return constant
    if "join" in value:
        parts = tuple(_parse(part) for part in value["of"])
        axis = int(value["join"])
        around = {(*part.shape[:axis], *part.shape[axis + 1 :], part.dtype) for part in parts}
        _require(len(around) == 1 and all(0 <= axis < len(part.shape) for part in parts), value)
        return Join(axis, parts)
    if "sum" in value:
        parts = tuple(_parse(part) for part in value["sum"])
        _require(len({(part.shape, part.dtype) for part in parts}) == 1, value)
        return Sum(parts)
    of = _parse(value["of"])
    if "sum_along" in value:
        axis, groups = value["sum_along"], tuple(_shape(group) for group in value["groups"])
        _require(type(axis) is int and 0 <= axis < len(of.shape) and of.dtype == "float32", value)
        _require(bool(groups) and all(group and max(group) < of.shape[axis] for group in groups), value)
        return SumAlong(axis, groups, of)
    if "scaled" in value:
        _require(type(value["scaled"]) is int and abs(value["scaled"]) <= 126 and of.dtype == "float32", value)
        return Scaled(value["scaled"], of)
    if "rotated" in value:
        size, axis = value["rotated"], value["axis"]
        _require(size in SIZES and type(axis) is int and 0 <= axis < len(of.shape) and of.dtype == "float32", value)
        _require(of.shape[axis] % size == 0 and not isinstance(of, Scales | Blockwise), value)
        return Rotated(axis, size, of)
    for what, made in (("quantized", Quantized), ("scales", Scales)):
        if what in value:
            fits = value[what] in KINDS and of.dtype == "float32" and not isinstance(of, Scales | Blockwise)
            _require(fits and type(value["axis"]) is int and 0 <= value["axis"] < len(of.shape), value)
            return made(value[what], value["axis"], of)
    if "blockwise" in value:
        how = Format(**{each.name: value[each.name] for each in fields(Format)})
        fits = value["blockwise"] in PARTS and how.fits() and len(of.shape) == 2 and of.dtype == "float32"
        _require(fits and of.shape[1] % how.size == 0 and not isinstance(of, Scales | Blockwise), value)
        return Blockwise(value["blockwise"], how, of)
    if "transpose" in value:
        axes = _shape(value["transpose"])
        _require(sorted(axes) == list(range(len(of.shape))), value)
        return Transpose(axes, of)
    if "reshape" in value:
        shape = _shape(value["reshape"])
        _require(prod(shape) == prod(of.shape), value)
        return Reshape(shape, of)
    _require(of.dtype == "float32", value)
    if value.get("bfloat16") is True:
        return Bfloat16(of)
    smallest, largest = value["float16"]
    return Float16(float(smallest), float(largest), of)


def _shape(value: Sequence[Any]) -> Shape:
    numbers = tuple(value)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"not a shape or a list of axes: {value!r}")
    return numbers


def _require(condition: bool, value: Mapping[str, Any]) -> None:
    if not condition:
        raise ValueError(f"a recipe whose parts do not fit together: {value!r}")
