"""A stub: a tensor of an ONNX graph with a type and a shape, but no values.

Its data is external, at a location that does not exist. Another entry of its `external_data` describes the values
(`sdflow.weights.stubs`), so that it survives copying, renaming, saving and loading of the TensorProto.
"""

from __future__ import annotations

from typing import Any

STUB_LOCATION = "weights-of-the-checkpoint"


def is_stub(tensor: Any) -> bool:
    """Whether a TensorProto is a stub. Imports nothing: passes ask this of every tensor."""
    return any(entry.key == "location" and entry.value == STUB_LOCATION for entry in tensor.external_data)
