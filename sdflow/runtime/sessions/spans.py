"""Where a weight's bytes are in a model's data files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdflow.onnx_model.facts import tensor_bytes
from sdflow.onnx_model.files import data_span

if TYPE_CHECKING:
    import onnx

ALIGNMENT = 256
"""Alignment of weights on a device in bytes, as in the driver's own allocations."""

Span = tuple[str, int, int]
"""File name, offset and length in bytes."""


def span_of(tensor: onnx.TensorProto) -> Span:
    """Return the span of an external tensor."""
    location, offset, length = data_span(tensor)
    return location, offset, tensor_bytes(tensor) if length is None else length


def aligned(size: int) -> int:
    """Round a size up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
