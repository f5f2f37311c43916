"""Formats of weight files: plain safetensors, float8 and int8 safetensors with scales, and GGUF.

`open_weights` opens any of them and yields the model's tensors, each read on demand, dequantized, without scales and
markers. A format is a file in this folder and a row of `_OPENERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sdflow.sources.formats.gguf_file import open_gguf
from sdflow.sources.formats.quantized_safetensors import open_safetensors
from sdflow.sources.formats.stored import StoredTensor, WeightsFile
from sdflow.sources.reference import FILE_SUFFIXES

__all__ = ["StoredTensor", "WeightsFile", "open_weights"]

_OPENERS: Mapping[str, Callable[[Path], WeightsFile]] = {".safetensors": open_safetensors, ".gguf": open_gguf}
assert tuple(_OPENERS) == FILE_SUFFIXES


def open_weights(path: Path) -> WeightsFile:
    """Open a weight file by its suffix (one of FILE_SUFFIXES; others are read as safetensors). Reads only headers and
    scales.

    Raises CheckpointError for a damaged file. Unsupported formats are opened, too; `require_read` rejects them.
    """
    return _OPENERS.get(path.suffix.lower(), open_safetensors)(path)
