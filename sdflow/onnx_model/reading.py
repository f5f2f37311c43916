"""Reading the graph of a file that others wrote, within a limit of memory and time.

In protobuf's format an empty node takes two bytes. In memory it takes two hundred, and ONNX Runtime's takes three hundred. So
what a file holds is counted before anybody builds it: 16 MB of empty nodes would take 4 GB.
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
"""Fields of all messages in a file. The UNet of Stable Diffusion XL has a tenth of them. In memory they take 0.3 GB at most."""
LEAST_BYTES = 2
"""Of an entry: a tag and a length, or a tag and a number."""
NUMBERS_IN_ENTRY = 16
"""Packed numbers that count as one entry: a byte of the file may become eight in memory."""
_PACKED_NUMBERS = frozenset({"int32_data", "int64_data", "uint64_data"})
_VARINT, _EIGHT_BYTES, _COUNTED, _BEGIN, _END, _FOUR_BYTES = range(6)
"""Kinds of fields in the format: https://protobuf.dev/programming-guides/encoding."""


def load_graph(path: Path) -> onnx.ModelProto:
    """The ModelProto of a file, without its external data.

    Raises OSError where it cannot be read, one of `sdflow.onnx_model.files.decode_errors` where it is no ONNX model, and
    VerificationError where it would take too much to read.
    """
    import onnx

    require_small_graph(path)
    return onnx.load(str(path), load_external_data=False)


def require_small_graph(path: Path) -> None:
    """Raises VerificationError for a file with more than MOST_ENTRIES, OSError for what is no regular file.

    A file that is too short for so many is not opened.
    """
    if require_regular(path).st_size <= MOST_ENTRIES * LEAST_BYTES:
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not _few(content):
            raise VerificationError(
                f"a graph of more than {MOST_ENTRIES:,} entries, which would take too much memory to read",
                where=str(path),
                remedy="No model needs so many: the file is damaged, or made to fill the memory.",
            )


def _few(content: mmap.mmap) -> bool:
    """Whether a ModelProto has at most MOST_ENTRIES. What is no ModelProto counts as far as protobuf would read it."""
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
                return True  # it is cut off here
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
        elif form not in (_BEGIN, _END):  # of groups: unknown fields, which stay bytes
            return True
    return True


def _number(content: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """A number in protobuf's form and where it ends; one that is cut off ends where its message does."""
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
