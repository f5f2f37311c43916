"""A symbol: an array with a shape, a type and a recipe, but no values.

ONNX Runtime's fusions read a weight as a numpy array, rearrange it with numpy's functions, and store the result. Given
a symbol instead, each operation is recorded. Any function that would read values, or is not known to only move them,
raises WeightValueRead.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np

from sdflow.errors import WeightValueRead
from sdflow.weights.recipe import Constant, Join, Recipe, Reshape, Transpose, params

Shape = tuple[int, ...]


class Symbol:
    """An array without values: shape, dtype and recipe. Follows numpy's interface for operations that only move
    values."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, recipe: Recipe, reads: list[WeightValueRead]) -> None:
        self.recipe = recipe
        self._reads = reads

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # FusionBiasAdd checks isinstance(value, numpy.ndarray) and would silently not match otherwise. numpy is unaffected.
        return np.ndarray

    @property
    def shape(self) -> Shape:
        return self.recipe.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.recipe.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> Symbol:
        return self.transpose()

    def transpose(self, *axes: Any) -> Symbol:
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = tuple(reversed(range(self.ndim))) if order in ((), None) else tuple(int(axis) for axis in order)
        order = tuple(axis % self.ndim for axis in order)
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"axes {order} of an array with {self.ndim} dimensions")
        return self._moved(self.recipe if order == tuple(range(self.ndim)) else Transpose(order, self.recipe))

    def reshape(self, *shape: Any) -> Symbol:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        sizes = [int(size) for size in ([wanted] if isinstance(wanted, int) else wanted)]
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = self.size // max(1, prod(size for size in sizes if size != -1))
        if min(sizes, default=0) < 0 or prod(sizes) != self.size:
            raise ValueError(f"cannot reshape an array of shape {self.shape} into {wanted}")
        new = tuple(sizes)
        return self._moved(self.recipe if new == self.shape else Reshape(new, self.recipe))

    def flatten(self) -> Symbol:
        return self.reshape(-1)

    ravel = flatten

    def squeeze(self, axis: int | None = None) -> Symbol:
        gone = [i for i, n in enumerate(self.shape) if n == 1] if axis is None else [axis % self.ndim]
        if any(self.shape[i] != 1 for i in gone):
            raise ValueError(f"cannot squeeze axis {axis} of shape {self.shape}")
        return self.reshape([n for i, n in enumerate(self.shape) if i not in gone])

    def copy(self) -> Symbol:
        return self._moved(self.recipe)

    def astype(self, dtype: Any, **_options: Any) -> Symbol:
        if np.dtype(dtype) != self.dtype:
            self.refuse(f"astype({np.dtype(dtype).name})")
        return self._moved(self.recipe)

    def _moved(self, recipe: Recipe) -> Symbol:
        return Symbol(recipe, self._reads)

    def refuse(self, what: str) -> NoReturn:
        keys = ", ".join(dict.fromkeys(param.key for param in params(self.recipe)))
        error = WeightValueRead(
            f"{what} reads the values of {keys}",
            where=_caller(),
            remedy="The result may depend on the weights, so they must be carried through the passes.",
        )
        # Code that swallows the error, like ONNX Runtime's shape inference, would silently change the result.
        self._reads.append(error)
        raise error

    def __array__(self, *_args: Any, **_options: Any) -> NoReturn:
        self.refuse("a conversion to a numpy array")

    def __array_ufunc__(self, ufunc: Any, *_args: Any, **_options: Any) -> NoReturn:
        self.refuse(f"numpy.{ufunc.__name__}")

    def __array_function__(self, function: Any, _types: Any, args: Any, options: Any) -> Any:
        known = _FUNCTIONS.get(function)
        if known is None:
            self.refuse(f"numpy.{function.__name__}")
        return known(*args, **options)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # optional Python protocols; relevant ones are defined below
            raise AttributeError(name)
        self.refuse(f".{name}")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Symbol, *_args: object) -> NoReturn:
        self.refuse(name)

    return method


_LOOKS = """
    abs add radd sub rsub mul rmul truediv rtruediv floordiv mod pow neg matmul rmatmul eq ne lt le gt ge bool int float
    index iter len getitem setitem contains bytes buffer complex
"""
for _name in _LOOKS.split():
    setattr(Symbol, f"__{_name}__", _refusing(f"__{_name}__"))


def recipe_of(values: Any) -> Recipe:
    """Return the recipe of a symbol, or a constant of real values."""
    if isinstance(values, Symbol):
        return values.recipe
    array = np.ascontiguousarray(values)
    return Constant(array.tobytes(), array.shape, array.dtype.name)


def join(arrays: Sequence[Any], axis: int = 0) -> Symbol:
    """Concatenate symbols and arrays of one type, like numpy.concatenate."""
    symbol = next(array for array in arrays if isinstance(array, Symbol))
    parts = tuple(recipe_of(array) for array in arrays)
    axis %= symbol.ndim
    if len({part.dtype for part in parts}) > 1:
        symbol.refuse("a join of different types")
    if len({(len(part.shape), part.shape[:axis], part.shape[axis + 1 :]) for part in parts}) > 1:
        raise ValueError(f"arrays of shapes {[part.shape for part in parts]} do not fit along axis {axis}")
    return symbol._moved(Join(axis, parts))


def _stack(arrays: Sequence[Any], axis: int = 0) -> Symbol:
    ndim = len(arrays[0].shape) + 1
    return join([_expand(array, axis % ndim) for array in arrays], axis % ndim)


def _dstack(arrays: Sequence[Any]) -> Symbol:
    return join([_at_least_3d(array) for array in arrays], 2)


def _expand(array: Any, axis: int) -> Any:
    return array.reshape([*array.shape[:axis], 1, *array.shape[axis:]])


def _at_least_3d(array: Any) -> Any:
    shape = tuple(array.shape)
    return array.reshape({0: (1, 1, 1), 1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.concatenate: join,
    np.stack: _stack,
    np.dstack: _dstack,
    np.transpose: lambda array, axes=None: array.transpose(axes),
    np.reshape: lambda array, shape: array.reshape(shape),
    np.ravel: lambda array: array.flatten(),
    np.squeeze: lambda array, axis=None: array.squeeze(axis),
    np.expand_dims: lambda array, axis: _expand(array, axis % (array.ndim + 1)),
    np.copy: lambda array: array.copy(),
    np.shape: lambda array: array.shape,
    np.ndim: lambda array: array.ndim,
    np.size: lambda array: array.size,
}


def _caller() -> str:
    """Return file, line and function of the nearest frame outside this module, numpy and onnx."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        if path != __file__.replace("\\", "/") and "/numpy/" not in path and "/onnx/" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}"
    return "an unknown place"
