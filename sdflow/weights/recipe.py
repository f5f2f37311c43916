"""A recipe: how an initializer's values are computed from a checkpoint's tensors.

A recipe is a small tree. Its leaves are parameters, named by their `state_dict` keys, and constants. Inner nodes move
values (transpose, reshape, join), add, scale, or rotate them, or round them: to float16 or bfloat16, or as the outermost
node to few bits with scales per channel or block. Weights undergo nothing else on their way into an optimized graph.
`sdflow.weights.recipe_json` stores recipes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdflow.weights.blockwise import Format
from sdflow.weights.blockwise import Part as BlockPart
from sdflow.weights.half import AtLimit, to_bfloat16, to_float16
from sdflow.weights.quantized import KINDS

Array = NDArray[Any]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Param:
    """A float32 parameter of the module."""

    key: str
    shape: Shape
    dtype: str = "float32"


@dataclass(frozen=True)
class Constant:
    """Values of the graph, not of the checkpoint: little-endian raw bytes."""

    raw: bytes
    shape: Shape
    dtype: str


class _Of:
    """Base of recipes of another recipe's values, with its shape and type by default."""

    of: Recipe

    @property
    def shape(self) -> Shape:
        return self.of.shape

    @property
    def dtype(self) -> str:
        return self.of.dtype


class _Parts:
    """Base of recipes of several parts, with the first one's type and, by default, shape."""

    parts: tuple[Recipe, ...]

    @property
    def shape(self) -> Shape:
        return self.parts[0].shape

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype


@dataclass(frozen=True)
class Transpose(_Of):
    """Permutes axes like `numpy.transpose(values, axes)`."""

    axes: tuple[int, ...]
    of: Recipe

    @property
    def shape(self) -> Shape:
        return tuple(self.of.shape[axis] for axis in self.axes)


@dataclass(frozen=True)
class Reshape:
    """Reshapes values in row-major order."""

    shape: Shape
    of: Recipe

    @property
    def dtype(self) -> str:
        return self.of.dtype


@dataclass(frozen=True)
class Join(_Parts):
    """Concatenates parts along a non-negative axis, like `numpy.concatenate`."""

    axis: int
    parts: tuple[Recipe, ...]

    @property
    def shape(self) -> Shape:
        first = list(self.parts[0].shape)
        first[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(first)


@dataclass(frozen=True)
class Float16(_Of):
    """Rounds to float16; nonzero magnitudes below `smallest` and finite ones above `largest` are clamped to them."""

    smallest: float
    largest: float
    of: Recipe
    dtype = "float16"

    def round(self, values: Array, counts: AtLimit | None) -> Array:
        """Round the values; those at the type's limits are added to `counts`."""
        return to_float16(values, self.smallest, self.largest, counts)


@dataclass(frozen=True)
class Bfloat16(_Of):
    """Rounds to bfloat16."""

    of: Recipe
    dtype = "bfloat16"

    def round(self, values: Array, counts: AtLimit | None) -> Array:
        """Round the values; non-finite ones are added to `counts`."""
        return to_bfloat16(values, counts)


@dataclass(frozen=True)
class Sum(_Parts):
    """Adds parts of one shape and type in float32, from left to right, and rounds to their type at the end."""

    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class SumAlong(_Of):
    """Sums entries along an axis: entry i is the sum of the entries in groups[i], in float32, from left to right."""

    axis: int
    groups: tuple[tuple[int, ...], ...]
    of: Recipe
    dtype = "float32"

    @property
    def shape(self) -> Shape:
        return (*self.of.shape[: self.axis], len(self.groups), *self.of.shape[self.axis + 1 :])


@dataclass(frozen=True)
class Scaled(_Of):
    """Multiplies float32 values by 2**power, which is exact unless a result overflows or becomes subnormal."""

    power: int
    of: Recipe
    dtype = "float32"


@dataclass(frozen=True)
class Rotated(_Of):
    """Multiplies float32 values by a Hadamard matrix along an axis, in groups of `size` (`sdflow.weights.hadamard`)."""

    axis: int
    size: int
    of: Recipe


@dataclass(frozen=True)
class Quantized(_Of):
    """Quantizes values to multiples of their channel's scale. kind: key of `sdflow.weights.quantized.KINDS`. axis:
    channels, non-negative."""

    kind: str
    axis: int
    of: Recipe

    @property
    def dtype(self) -> str:
        return KINDS[self.kind].dtype


@dataclass(frozen=True)
class Scales(_Of):
    """The scales of the corresponding `Quantized`: float32, one per channel."""

    kind: str
    axis: int
    of: Recipe
    dtype = "float32"

    @property
    def shape(self) -> Shape:
        return (self.of.shape[self.axis],)


@dataclass(frozen=True)
class Blockwise(_Of):
    """A part of a weight (N, K) quantized in blocks (`sdflow.weights.blockwise`): values, scales, or zeros. how.size
    divides K."""

    part: BlockPart
    how: Format
    of: Recipe

    @property
    def shape(self) -> Shape:
        return self.how.shape(self.part, *self.of.shape)

    @property
    def dtype(self) -> str:
        return self.how.dtype(self.part)


Rounded = Float16 | Bfloat16

Quantizing = Quantized | Scales | Blockwise

Recipe = Param | Constant | Transpose | Reshape | Join | Rounded | Sum | SumAlong | Scaled | Rotated | Quantizing


def params(recipe: Recipe) -> Iterator[Param]:
    """Yield the parameters that a recipe reads, from left to right, with repetitions."""
    if isinstance(recipe, Param):
        yield recipe
    elif isinstance(recipe, Join | Sum):
        for part in recipe.parts:
            yield from params(part)
    elif not isinstance(recipe, Constant):
        yield from params(recipe.of)


def unrounded(recipe: Recipe) -> Recipe:
    """Return the recipe without rounding to 16 bits; float16 constants are widened."""
    if isinstance(recipe, Rounded):
        return unrounded(recipe.of)
    if isinstance(recipe, Constant) and recipe.dtype == "float16":
        return Constant(np.frombuffer(recipe.raw, "<f2").astype("<f4").tobytes(), recipe.shape, "float32")
    if isinstance(recipe, Join | Sum):
        return replace(recipe, parts=tuple(unrounded(part) for part in recipe.parts))
    return recipe if isinstance(recipe, Param | Constant) else replace(recipe, of=unrounded(recipe.of))
