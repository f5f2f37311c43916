"""Weights in buffers and files of limited size: programs join files into buffers, graphs refer to buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sdflow.errors import UsageError
from sdflow.onnx_model.files import data_span, initializers_and_constants, is_external, set_external
from sdflow.units import spell_bytes

BUFFER = 1 << 28
"""Bytes of weights per buffer. A larger tensor gets its own buffer."""
LARGEST = (1 << 31) - 1
"""Maximum bytes of a tensor: browsers allow no larger buffers."""
ALIGNED = 16
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Span:
    """A byte range of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Buffer:
    """A buffer of weights in the browser.

    path: its name in the graph. spans: its content, each padded to ALIGNED. files: names and sizes of the files to
    join.
    """

    path: str
    spans: tuple[Span, ...]
    files: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def into_buffers(model: Any, name: str, most: int, *, buffer: int = BUFFER) -> tuple[Buffer, ...]:
    """Assign a graph's weights to buffers, and make the graph refer to them. Equal byte ranges are stored once. most:
    bytes per file.

    Raises UsageError for a tensor that no buffer can hold.
    """
    buffers: list[list[Span]] = [[]]
    places: dict[Span, tuple[int, int]] = {}
    end = 0
    for tensor, _ in initializers_and_constants(model):
        if not is_external(tensor):
            continue
        file, offset, length = data_span(tensor)
        assert length is not None, "as read_part writes them"
        span = Span(file, offset, length)
        if length > LARGEST:
            raise UsageError(
                f"{tensor.name} has {spell_bytes(length)} of weights, but a browser holds at most "
                f"{spell_bytes(LARGEST)} in one buffer",
                where=name,
                remedy="Build the pipeline in float16.",
            )
        if span not in places:
            if buffers[-1] and end + length > buffer:
                buffers.append([])
                end = 0
            places[span] = (len(buffers), end)
            buffers[-1].append(span)
            end += _filled(length)
        number, at = places[span]
        set_external(tensor, f"{name}-{number}", at, length)
    made = []
    for number, spans in enumerate(buffers, 1):
        size = sum(_filled(span.length) for span in spans)
        sizes = [min(most, size - begin) for begin in range(0, size, most)]
        files = {f"{name}-{number}.{part:03}.bin": each for part, each in enumerate(sizes, 1)}
        made.append(Buffer(f"{name}-{number}", tuple(spans), files))
    return tuple(each for each in made if each.spans)


def write_buffer(buffer: Buffer, folder: Path, place: Callable[[str], Path]) -> dict[str, str]:
    """Write the files of a buffer. Returns their SHA-256. folder: of the spans' files. place: maps a name to a path."""
    content = _content(buffer.spans, folder)
    rest, digests = b"", {}
    for name, size in buffer.files.items():
        digest, left = hashlib.sha256(), size
        with place(name).open("wb") as stream:
            while left:
                block = rest or next(content)
                taken, rest = block[:left], block[left:]
                stream.write(taken)
                digest.update(taken)
                left -= len(taken)
        digests[name] = digest.hexdigest()
    return digests


def _content(spans: Sequence[Span], folder: Path) -> Iterator[bytes]:
    opened: dict[str, IO[bytes]] = {}
    try:
        for span in spans:
            if span.file not in opened:
                opened[span.file] = (folder / span.file).open("rb")
            stream, left = opened[span.file], span.length
            stream.seek(span.offset)
            while left:
                block = stream.read(min(left, _BLOCK))
                if not block:
                    raise OSError(f"{span.file} ends before byte {span.offset + span.length:,}")
                left -= len(block)
                yield block
            if padding := _filled(span.length) - span.length:
                yield bytes(padding)
    finally:
        for stream in opened.values():
            stream.close()


def _filled(length: int) -> int:
    return -(-length // ALIGNED) * ALIGNED
