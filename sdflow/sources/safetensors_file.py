"""Read safetensors files without torch: the header, single tensors, digests of tensors.

Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow import stop
from sdflow.disk.input_file import foreign_content, open_input, parse_json
from sdflow.errors import CheckpointError, os_errors_as

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_WHOLE = {
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types that weights are read from."""
_MAX_HEADER = 16 << 20
"""Maximum bytes. The format allows 100 MB, which take gigabytes once parsed; Stable Diffusion XL's header has 0.3 MB,
and training programs' metadata a few."""
_MOST_TENSORS = 50_000
"""A LoRA of Stable Diffusion XL has two or three thousand, a single-file checkpoint 2,500."""
_BLOCK = 1 << 22


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: dtype in the format's spelling, shape, byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _invalid(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"not a valid safetensors file: {what}", where=str(path), remedy="Download or write the file again."
    )


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name. Raises CheckpointError unless header and file size match exactly."""
    header, data_start, size = _read_json(path)
    entries = {name: _entry(path, name, value, data_start) for name, value in header.items() if name != "__metadata__"}
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _invalid(path, f"tensor {name} does not begin where the previous one ends")
        position = entry.end
    if position != size:
        raise _invalid(path, f"its tensors end at byte {position}, the file at byte {size}")
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """The free-form strings of a safetensors file's header. Raises CheckpointError for an invalid file."""
    metadata = _read_json(path)[0].get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _invalid(path, "its metadata are not a JSON object")
    return {str(key): str(value) for key, value in metadata.items()}


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, the position of the first tensor byte, the file's size."""
    with os_errors_as("cannot be read", path, kind=CheckpointError), open_input(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if _MAX_HEADER < length <= size - 8:
            raise _invalid(path, f"a header of {length >> 20} MB; at most {_MAX_HEADER >> 20} MB are supported")
        if length == 0 or length > size - 8:
            raise _invalid(path, foreign_content(path) or f"{size} bytes with a header of {length} bytes")
        text = stream.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise _invalid(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _invalid(path, "its header is not a JSON object")
    if len(header) > _MOST_TENSORS:
        raise _invalid(path, f"{len(header):,} tensors; at most {_MOST_TENSORS:,} are supported")
    return header, 8 + length, size


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise _invalid(path, f"the entry of tensor {name} is incomplete") from error
    if not isinstance(value["shape"], list) or not all(type(number) is int and number >= 0 for number in numbers):
        raise _invalid(path, f"the entry of tensor {name} has numbers that are not counts")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _invalid(path, f"tensor {name} has the unknown dtype {dtype!r:.40}")
    if end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise _invalid(path, f"tensor {name} has {end - begin} bytes for shape {list(shape)} of {dtype}")
    return TensorEntry(dtype, shape, data_start + begin, data_start + end)


def digest_tensors(path: Path, entries: Mapping[str, TensorEntry]) -> str:
    """SHA-256 of (name, dtype, shape, bytes) of the given tensors of a file, sorted by name."""
    digest = hashlib.sha256()
    with open_input(path) as stream:
        for name in sorted(entries):
            entry = entries[name]
            digest.update(json.dumps([name, entry.dtype, entry.shape], separators=(",", ":")).encode() + b"\n")
            stream.seek(entry.begin)
            left = entry.end - entry.begin
            while left:
                block = stream.read(min(_BLOCK, left))
                if not block:
                    raise _invalid(path, f"it ends within tensor {name}")
                digest.update(block)
                left -= len(block)
                stop.check()
    return digest.hexdigest()


def read_entry(path: Path, name: str, entry: TensorEntry) -> bytes:
    """The bytes of a small tensor. Raises CheckpointError if the file ends earlier."""
    with os_errors_as("cannot be read", path, kind=CheckpointError), open_input(path) as stream:
        stream.seek(entry.begin)
        raw = stream.read(entry.end - entry.begin)
    if len(raw) != entry.end - entry.begin:
        raise _invalid(path, f"it ends within tensor {name}")
    return raw


def float_values(path: Path, name: str, entry: TensorEntry) -> NDArray[np.float32]:
    """A small tensor as float32. Raises CheckpointError for dtypes other than F64, F32, F16 and BF16."""
    return _decode(path, name, entry, read_entry(path, name, entry))


def require_floats(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Raises CheckpointError, from the header, for a tensor other than F64, F32, F16 or BF16: integers and float8 are
    quantized, with separate scales."""
    for name, entry in entries.items():
        if entry.dtype != "BF16" and entry.dtype not in _FLOATS:
            raise CheckpointError(
                f"tensor {name} is of dtype {entry.dtype}", where=str(path), remedy="Convert it to F32, F16 or BF16."
            )


def read_numbers(path: Path, names: Iterable[str]) -> dict[str, float]:
    """Tensors of a file that hold one number each, integers included: `torch.tensor(4)` is an I64 alpha.

    Raises CheckpointError for other dtypes, and for tensors of several numbers."""
    import numpy as np

    entries, found = read_header(path), {}
    with path.open("rb") as stream:
        for name in names:
            entry = entries[name]
            if prod(entry.shape) != 1:
                raise CheckpointError(f"{name}: {list(entry.shape)}, expected one number", where=str(path))
            stream.seek(entry.begin)
            raw = stream.read(entry.end - entry.begin)
            whole = _WHOLE.get(entry.dtype)
            values = np.frombuffer(raw, whole) if whole else _decode(path, name, entry, raw)
            found[name] = float(values.reshape(()))
    return found


def require_numbers(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Raises CheckpointError, from the header, for a dtype that `read_numbers` does not support."""
    require_floats(path, {name: entry for name, entry in entries.items() if entry.dtype not in _WHOLE})


def read_float_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, NDArray[np.float32]]:
    """Tensors of a file as float32 arrays (all of them by default). Raises CheckpointError for other dtypes."""
    entries = read_header(path)
    tensors = {}
    with path.open("rb") as stream:
        for name in entries if names is None else names:
            entry = entries[name]
            stream.seek(entry.begin)
            tensors[name] = _decode(path, name, entry, stream.read(entry.end - entry.begin))
    return tensors


def _decode(path: Path, name: str, entry: TensorEntry, raw: bytes) -> NDArray[np.float32]:
    import numpy as np

    if len(raw) != entry.end - entry.begin:
        raise _invalid(path, f"it ends within tensor {name}")
    if entry.dtype == "BF16":  # the upper half of a float32
        wide = np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(entry.shape)
    require_floats(path, {name: entry})
    return np.frombuffer(raw, _FLOATS[entry.dtype]).astype(np.float32).reshape(entry.shape)
