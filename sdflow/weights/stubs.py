"""Recipes of stubs (`sdflow.onnx_model.stub`), and whether passes currently run on stubs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sdflow.onnx_model.stub import STUB_LOCATION

if TYPE_CHECKING:
    from sdflow.weights.recipe import Recipe

_recording: list[None] = []  # one entry per active recording in this process


@contextmanager
def while_recording() -> Iterator[None]:
    """Make `is_recording()` true inside."""
    _recording.append(None)
    try:
        yield
    finally:
        _recording.pop()


def is_recording() -> bool:
    """Whether this process currently runs passes on stubs (`sdflow.weights.recording`)."""
    return bool(_recording)


_RECIPE = "recipe"


def stub_recipe(tensor: Any) -> Recipe:
    """Return the recipe of a stub."""
    from sdflow.weights.recipe_json import from_json

    return from_json(json.loads(next(entry.value for entry in tensor.external_data if entry.key == _RECIPE)))


def make_stub(tensor: Any, recipe: Recipe) -> None:
    """Turn a TensorProto into a stub with the recipe's type and shape."""
    import numpy as np
    import onnx

    from sdflow.weights.recipe_json import to_json

    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=STUB_LOCATION)
    tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(recipe.dtype))
    tensor.dims[:] = recipe.shape
    tensor.external_data.add(key=_RECIPE, value=json.dumps(to_json(recipe), separators=(",", ":")))
