"""Bringing an object down: into a folder of its own, each piece checked before it is written, and gone on with after a break.

Nothing is believed of what an earlier attempt left: its files are hashed again, piece by piece. What other objects of the
cache have at the same place of a file of the same name and size is copied from there.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from sdflow import stop
from sdflow.disk.input_file import open_input
from sdflow.store.layout import Layout, remove_tree
from sdflow.store.records import Stored
from sdflow.store.remote.entry import Piece, RemoteObject, placed
from sdflow.store.remote.share import Lines, Unusable
from sdflow.units import spell_bytes

LOOKED_INTO, WORTH_LOOKING = 2, 4 << 20
"""How many local files at most are searched for pieces, and from how many bytes of a file on."""
SETTLING = 15.0
"""Seconds. Before they have passed, the speed is not judged."""

_Places = dict[Piece, list[tuple[Path, int]]]
"""Where pieces are to be written: files and offsets."""


class WrongBytes(Exception):
    """The remote has other bytes at a path than belong there."""

    def __init__(self, path: str, data: bytes, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.data = path, data


def incoming(layout: Layout, entry: Stored) -> Path:
    """The folder that an object comes into. It outlives the process, so that the next goes on from there."""
    folder = layout.incoming / entry.object
    if any(not (path.is_dir() or path.is_file()) or path.is_symlink() for path in (folder, *folder.rglob("*"))):
        remove_tree(folder)  # it is not what `bring` left: a pipe, a link to somewhere else
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)  # `gc` removes what nobody went on with for long
    return folder


def written(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk: those that are still to come are holes."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file()) if os.name != "nt" else 0


def bring(
    content: RemoteObject,
    folder: Path,
    read: Callable[[str, int], bytes],
    lines: Lines,
    *,
    patience: float,
    like: Callable[[str, int], Sequence[Path]],
) -> None:
    """Make the object's files in `folder`. read: the remote's file at a path, with the bytes expected. patience: seconds that it
    may take in all, by the speed so far. like: local files that may have the same pieces.

    Raises WrongBytes, Absent, Unusable, OSError.
    """
    wanted = _missing(content, folder, like)
    size = sum(piece.size for piece in wanted)
    begun, left = time.monotonic(), size

    def fetch(piece: Piece) -> int:
        data = read(piece.path, piece.size)
        if not _is(data, piece):
            data = read(piece.path, piece.size)  # a bit may flip on the way
        if not _is(data, piece):
            raise WrongBytes(piece.path, data, f"{len(data):,} bytes that do not have this digest")
        for path, offset in wanted[piece]:
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


def _missing(content: RemoteObject, folder: Path, like: Callable[[str, int], Sequence[Path]]) -> _Places:
    """The pieces that are not in the folder yet, after taking what is to be had on this machine."""
    wanted: _Places = defaultdict(list)
    for entry, pieces in content.files:
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        sources = [path] if path.exists() else []
        with path.open("r+b" if sources else "xb") as stream:
            stream.truncate(entry.size)
        if entry.size >= WORTH_LOOKING:
            sources += like(entry.path, entry.size)[:LOOKED_INTO]
        lacking = list(placed(pieces))
        for source in sources:
            lacking = _take(source, path, lacking)
        for piece, offset in lacking:
            wanted[piece].append((path, offset))
    return wanted


def _take(source: Path, path: Path, lacking: list[tuple[Piece, int]]) -> list[tuple[Piece, int]]:
    """Copy what a file has of these pieces; returns the others. The file itself, half done, has what is in place."""
    left = []
    try:
        stream = open_input(source)
    except OSError:  # collected just now, or a pipe in its place
        return lacking
    with stream:
        for piece, offset in lacking:
            stop.check()
            stream.seek(offset)
            data = stream.read(piece.size)
            if not _is(data, piece):
                left.append((piece, offset))
            elif source != path:
                _write(path, offset, data)
    return left


def _is(data: bytes, piece: Piece) -> bool:
    return len(data) == piece.size and hashlib.sha256(data).hexdigest() == piece.sha256


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)
