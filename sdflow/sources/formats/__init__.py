"""The formats of files of weights: plain safetensors, float8 and int8 safetensors with scales, and GGUF.

`open_weights` opens any of them. What it gives are the tensors that the model has, each read when it is asked for: scales and
markers are no tensors of it, and quantized values are dequantized. A format is a file of this folder and a row of `_OPENERS`.
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
    """A file of weights, by its suffix (one of FILE_SUFFIXES; any other is read as safetensors). Reads headers and scales alone.

    Raises CheckpointError for a damaged file. One in a format that sdflow does not read is opened too: `require_read` refuses it.
    """
    return _OPENERS.get(path.suffix.lower(), open_safetensors)(path)
