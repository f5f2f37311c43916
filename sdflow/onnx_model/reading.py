"""Read an untrusted file's graph within memory and time limits.

An empty node takes two bytes in protobuf's format, but two hundred in memory, and three hundred more in ONNX Runtime.
So a file's entries are counted before it is parsed: 16 MB of empty nodes would take 4 GB.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.input_file import require_regular
from sdflow.errors import VerificationError

if TYPE_CHECKING:
    import onnx

MOST_ENTRIES = 1 << 20
"""Maximum number of fields of all messages in a file. SDXL's UNet has a tenth of that. They take at most 0.3 GB in
memory."""
LEAST_BYTES = 2
"""Minimum size of an entry: a tag and a length, or a tag and a number."""
NUMBERS_IN_ENTRY = 16
"""Packed numbers that count as one entry: a byte of the file can become eight in memory."""
_PACKED_NUMBERS = frozenset({"int32_data", "int64_data", "uint64_data"})
_VARINT, _EIGHT_BYTES, _COUNTED, _BEGIN, _END, _FOUR_BYTES = range(6)
"""Wire types: https://protobuf.dev/programming-guides/encoding."""


def load_graph(path: Path) -> onnx.ModelProto:
    """Load the ModelProto of a file, without its external data.

    Raises OSError if it cannot be read, one of `sdflow.onnx_model.files.decode_errors` if it is not an ONNX model, and
    VerificationError if it is too large to read.
    """
    import onnx

    require_small_graph(path)
    return onnx.load(str(path), load_external_data=False)


def require_small_graph(path: Path) -> None:
    """Raise VerificationError for a file with more than MOST_ENTRIES, OSError if it is not a regular file.

    Files too short for that many are not opened.
    """
    if require_regular(path).st_size <= MOST_ENTRIES * LEAST_BYTES:
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not _few(content):
            raise VerificationError(
                f"a graph of more than {MOST_ENTRIES:,} entries, which would take too much memory to read",
                where=str(path),
                remedy="No model needs that many: the file is damaged or malicious.",
            )


def _few(content: mmap.mmap) -> bool:
    """Whether a ModelProto has at most MOST_ENTRIES. Invalid files are counted as far as protobuf would read them."""
    import onnx

    left = MOST_ENTRIES
    messages: list[tuple[int, Any]] = [(len(content), onnx.ModelProto.DESCRIPTOR)]
    known: dict[Any, dict[int, Any]] = {}
    at = 0
    while messages:
        end, kind = messages[-1]
        if at >= end:
            messages.pop()
            continue
        if (left := left - 1) < 0:
            return False
        if kind not in known:
            known[kind] = dict(kind.fields_by_number)
        tag, at = _number(content, at, end)
        form = tag & 7
        if form == _VARINT:
            _, at = _number(content, at, end)
        elif form == _COUNTED:
            length, at = _number(content, at, end)
            if at + length > end:
                return True  # truncated here
            field = known[kind].get(tag >> 3)
            if field is not None and field.message_type is not None:
                messages.append((at + length, field.message_type))
                continue
            if field is not None and field.name in _PACKED_NUMBERS:
                left -= length // NUMBERS_IN_ENTRY
            at += length
        elif form == _EIGHT_BYTES:
            at += 8
        elif form == _FOUR_BYTES:
            at += 4
        elif form not in (_BEGIN, _END):  # groups are unknown fields, which stay bytes
            return True
    return True


def _number(content: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Return a varint and its end; a truncated one ends with its message."""
    if at < end and (first := content[at]) < 128:
        return first, at + 1
    value = shift = 0
    while at < end:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at
