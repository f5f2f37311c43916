"""A stub: a tensor of an ONNX graph whose values are not there, only their type, their shape and their recipe.

Its data is external, at a location that is no file. The recipe travels in an entry of the tensor's `external_data`, so
it survives whatever a pass does to a TensorProto: copying, renaming, saving, loading.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdflow.weights.recipe import Recipe

_recording: list[None] = []  # one entry for each recording that is open in this process


def is_recording() -> bool:
    """Whether this process runs passes on stubs (`sdflow.weights.recording`)."""
    return bool(_recording)


STUB_LOCATION = "weights-of-the-checkpoint"
_RECIPE = "recipe"


def is_stub(tensor: Any) -> bool:
    """Whether a TensorProto is a stub. Imports nothing: other passes ask this of every tensor."""
    return any(entry.key == "location" and entry.value == STUB_LOCATION for entry in tensor.external_data)


def stub_recipe(tensor: Any) -> Recipe:
    """The recipe of a stub."""
    from sdflow.weights.recipe import from_json

    return from_json(json.loads(next(entry.value for entry in tensor.external_data if entry.key == _RECIPE)))


def make_stub(tensor: Any, recipe: Recipe) -> None:
    """Make a TensorProto a stub of the recipe's type and shape."""
    import numpy as np
    import onnx

    from sdflow.weights.recipe import to_json

    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=STUB_LOCATION)
    tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(recipe.dtype))
    tensor.dims[:] = recipe.shape
    tensor.external_data.add(key=_RECIPE, value=json.dumps(to_json(recipe), separators=(",", ":")))
