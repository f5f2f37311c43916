"""A stub: a tensor of an ONNX graph whose values are not there, only their type and their shape.

Its data is external, at a location that is no file. What the values are to be, another entry of the tensor's
`external_data` tells (`sdflow.weights.stubs`), so it survives whatever a pass does to a TensorProto: copying, renaming,
saving, loading.
"""

from __future__ import annotations

from typing import Any

STUB_LOCATION = "weights-of-the-checkpoint"


def is_stub(tensor: Any) -> bool:
    """Whether a TensorProto is a stub. Imports nothing: passes ask this of every tensor."""
    return any(entry.key == "location" and entry.value == STUB_LOCATION for entry in tensor.external_data)
