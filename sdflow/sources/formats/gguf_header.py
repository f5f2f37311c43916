"""Read the header of a GGUF file, with limits: numbers and texts of its metadata, and the locations of its tensors."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sdflow.disk.input_file import foreign_content, open_input
from sdflow.errors import CheckpointError, os_errors_as
from sdflow.sources.formats.ggml_types import TYPES

Value = int | float | bool | str | tuple[int, ...]
"""Metadata values that are kept: numbers, texts, and short lists of integers."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Numeric metadata types, by their number in the file."""
_FLOATS = (6, 12)
_TEXT, _LIST = 8, 9
_ALIGNMENT = "general.alignment"
_USUAL_ALIGNMENT = 32
_LARGEST_ALIGNMENT = 1 << 16
_MOST_TENSORS = 50_000
_MOST_ENTRIES = 100_000
"""Limit of metadata entries. ComfyUI-GGUF writes one entry per reshaped tensor."""
_MOST_TEXTS = 4_000_000
"""Total of all lists. A tokenizer has some 150,000 tokens, and as many merges."""
_MOST_AXES = 4
_LONGEST_NAME = 1024
_LONGEST_KEPT = 1 << 16
_LONGEST_LIST = 8
_BUFFER = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as listed in a GGUF header.

    shape: in safetensors' order. kind: of `TYPES`. offset: relative to the first tensor.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    size: of the file. data_begin: offset of the first tensor.
    """

    values: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_begin: int
    size: int


def invalid(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"not a valid GGUF file: {what[:400]}", where=str(path), remedy="Download or write the file again."
    )


def read_gguf_header(path: Path) -> Header:
    """Read the header. Raises CheckpointError for a file that is damaged or not GGUF."""
    with os_errors_as("cannot be read", path, kind=CheckpointError), open_input(path) as stream:
        return _Reader(path, stream).header()


class _Reader:
    """Reads forward, never beyond the file's end, whatever a length says."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream
        self.size = os.fstat(stream.fileno()).st_size
        self.place, self.texts = 0, 0

    def header(self) -> Header:
        if self.stream.read(4) != _MAGIC:
            raise invalid(self.path, foreign_content(self.path) or "it does not begin like one")
        self.place = 4
        version = self.number("<I")
        if version not in _VERSIONS:
            big_endian = version & 0xFFFF == 0
            what = (
                "it is big-endian"
                if big_endian
                else f"version {version}; {_VERSIONS[0]} and {_VERSIONS[1]} are supported"
            )
            raise invalid(self.path, what)
        count, entries = self.number("<Q"), self.number("<Q")
        if count > _MOST_TENSORS or entries > _MOST_ENTRIES:
            raise invalid(self.path, f"{count:,} tensors and {entries:,} entries of metadata")
        values: dict[str, Value] = {}
        seen: set[str] = set()
        for _ in range(entries):
            key = self.text(_LONGEST_KEPT)
            if key in seen:
                raise invalid(self.path, f"two entries {key:.100}")
            seen.add(key)
            if (value := self.value(self.number("<I"))) is not None:
                values[key] = value
        tensors = tuple(self.tensor() for _ in range(count))
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise invalid(self.path, "two tensors of one name")
        alignment = values.get(_ALIGNMENT, _USUAL_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise invalid(self.path, f"an alignment of {alignment!r:.40}")
        begin = -(-self.place // alignment) * alignment
        return Header(values, tensors, alignment, begin, self.size)

    def read(self, length: int) -> bytes:
        self.require(length)
        found = self.stream.read(length)
        if len(found) != length:
            raise invalid(self.path, f"its header ends at byte {self.place + len(found)}")
        self.place += length
        return found

    def skip(self, length: int) -> None:
        self.require(length)
        if length <= _BUFFER:
            self.read(length)
        else:
            self.stream.seek(length, os.SEEK_CUR)
            self.place += length

    def require(self, length: int) -> None:
        if length > self.size - self.place:
            raise invalid(self.path, f"a field of {length} bytes at byte {self.place} of {self.size}")

    def number(self, kind: str) -> int:
        found: int = struct.unpack(kind, self.read(struct.calcsize(kind)))[0]
        return found

    def text(self, longest: int) -> str:
        length = self.number("<Q")
        if length > longest:
            raise invalid(self.path, f"a name of {length} bytes")
        return self.decoded(self.read(length))

    def decoded(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise invalid(self.path, "a text that is not UTF-8") from error

    def value(self, kind: int) -> Value | None:
        """An entry's value; None if it is skipped."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            length = self.number("<Q")
            if length <= _LONGEST_KEPT:
                return self.decoded(self.read(length))
            self.skip(length)
            return None
        if kind == _LIST:
            return self.listed(self.number("<I"), self.number("<Q"))
        raise invalid(self.path, f"metadata of the unknown type {kind}")

    def listed(self, kind: int, count: int) -> Value | None:
        if kind in _NUMBERS:
            size = struct.calcsize(_NUMBERS[kind])
            if count > _LONGEST_LIST or kind in _FLOATS:
                self.skip(count * size)
                return None
            return tuple(self.number(_NUMBERS[kind]) for _ in range(count))
        if kind != _TEXT:
            raise invalid(self.path, f"a list of the type {kind}")
        self.texts += count
        if self.texts > _MOST_TEXTS:
            raise invalid(self.path, f"lists of {self.texts:,} texts")
        self.skip_texts(count)
        return None

    def skip_texts(self, count: int) -> None:
        """Skip texts, each with two reads: a tokenizer has hundreds of thousands."""
        read, length_of, place, size = self.stream.read, struct.Struct("<Q").unpack, self.place, self.size
        for _ in range(count):
            raw = read(8)
            length = length_of(raw)[0] if len(raw) == 8 else size
            place += 8
            if length > size - place:
                raise invalid(self.path, f"a text of {length} bytes at byte {place} of {size}")
            if length > _BUFFER:
                self.stream.seek(length, os.SEEK_CUR)
            else:
                read(length)
            place += length
        self.place = place

    def tensor(self) -> TensorInfo:
        name = self.text(_LONGEST_NAME)
        axes = self.number("<I")
        if axes > _MOST_AXES:
            raise invalid(self.path, f"tensor {name:.100} has {axes} axes")
        shape = tuple(self.number("<Q") for _ in range(axes))[::-1]
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in TYPES:
            raise invalid(self.path, f"tensor {name:.100} is of the unknown type {kind}")
        if any(size < 1 for size in shape):
            raise invalid(self.path, f"tensor {name:.100} is {list(shape)}")
        return TensorInfo(name, shape, kind, offset)
