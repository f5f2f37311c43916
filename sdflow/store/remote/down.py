"""Bringing an object down: into a folder of its own, each piece checked before it is written, and gone on with after a break.

Nothing is believed of what an earlier attempt left: its files are hashed again, piece by piece. What other objects of the
cache have at the same place of a file of the same name and size is copied from there.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sdflow import stop
from sdflow.disk.input_file import open_input
from sdflow.store.remote.entry import Piece, RemoteObject
from sdflow.store.remote.parallel import Lines
from sdflow.store.remote.share import Unusable
from sdflow.units import spell_bytes

LOOKED_INTO = 2
"""How many local files at most are searched for pieces."""
WORTH_LOOKING = 4 << 20
"""From how many bytes of a file on."""
SETTLING = 15.0
"""Seconds. Before they have passed, the speed is not judged."""


class WrongBytes(Exception):
    """The remote has other bytes at a path than belong there."""

    def __init__(self, path: str, data: bytes, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.data = path, data


@dataclass
class _Wanted:
    """Where a piece is to be written: files and offsets."""

    piece: Piece
    places: list[tuple[Path, int]] = field(default_factory=list)


def bring(
    content: RemoteObject,
    folder: Path,
    read: Callable[[str, int], bytes],
    lines: Lines,
    *,
    patience: float,
    like: Callable[[str, int], Sequence[Path]] = lambda path, size: (),
) -> tuple[int, int]:
    """Make the object's files in `folder`. Returns the bytes that were fetched, and those that were here already.

    read: the remote's file at a path, with the bytes expected. like: local files that may have the same pieces.
    patience: seconds that it may take in all, by the speed so far. Raises WrongBytes, Absent, Unusable, OSError.
    """
    wanted = _missing(content, folder, like)
    size = sum(each.piece.size for each in wanted)
    begun, left = time.monotonic(), size

    def fetch(each: _Wanted) -> int:
        data = read(each.piece.path, each.piece.size)
        if not _is(data, each.piece):
            data = read(each.piece.path, each.piece.size)  # a bit may flip on the way
        if not _is(data, each.piece):
            raise WrongBytes(each.piece.path, data, f"{len(data):,} bytes that do not have this digest")
        for path, offset in each.places:
            _write(path, offset, data)
        return len(data)

    def count(length: int) -> None:
        nonlocal left
        left -= length
        passed = time.monotonic() - begun
        if passed > SETTLING and passed + left * passed / max(1, size - left) > patience:
            raise Unusable(
                f"too slow: {spell_bytes(int((size - left) / passed))} in a second, {spell_bytes(left)} to go"
            )

    lines.for_each(wanted, fetch, count)
    return size, content.bytes - size


def _missing(content: RemoteObject, folder: Path, like: Callable[[str, int], Sequence[Path]]) -> list[_Wanted]:
    """The pieces that are not in the folder yet, after taking what is to be had on this machine."""
    wanted: dict[str, _Wanted] = {}
    for entry, pieces in content.files:
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("r+b" if there else "xb") as stream:
            stream.truncate(entry.size)
        sources = [path] if there else []
        if entry.size >= WORTH_LOOKING:
            sources += like(entry.path, entry.size)[:LOOKED_INTO]
        lacking = list(_offsets(pieces))
        for source in sources:
            lacking = _take(source, path, lacking)
        for piece, offset in lacking:
            wanted.setdefault(piece.sha256, _Wanted(piece)).places.append((path, offset))
    return list(wanted.values())


def _offsets(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    offset = 0
    for piece in pieces:
        yield piece, offset
        offset += piece.size


def _take(source: Path, path: Path, lacking: list[tuple[Piece, int]]) -> list[tuple[Piece, int]]:
    """Copy what a file has of these pieces; returns the others. The file itself, half done, has what is in place."""
    left: defaultdict[bool, list[tuple[Piece, int]]] = defaultdict(list)
    try:
        stream = open_input(source)
    except OSError:  # collected just now, or a pipe in its place
        return lacking
    with stream:
        for piece, offset in lacking:
            stop.check()
            stream.seek(offset)
            data = stream.read(piece.size)
            found = _is(data, piece)
            if found and source != path:
                _write(path, offset, data)
            left[found].append((piece, offset))
    return left[False]


def _is(data: bytes, piece: Piece) -> bool:
    return len(data) == piece.size and hashlib.sha256(data).hexdigest() == piece.sha256


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)
