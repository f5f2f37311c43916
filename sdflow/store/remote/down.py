"""Downloads an object into a folder of its own, checking each piece before writing it. Resumes after interruptions.

Files of an earlier attempt are hashed again, piece by piece. Pieces that another object of the cache has at the same
offset of a file with the same name and size are copied from there.
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

LOOKED_INTO, WORTH_LOOKING = 2, 4 << 20  # most local files to search for pieces; least bytes of a file to search for
SETTLING = 15.0  # seconds before the speed is judged
_Places = dict[Piece, list[tuple[Path, int]]]  # piece -> files and offsets to write it to


class WrongBytes(Exception):
    """The remote has the wrong bytes at a path."""

    def __init__(self, path: str, data: bytes, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.data = path, data


def incoming(layout: Layout, entry: Stored) -> Path:
    """Return the folder for an object's download. It outlives the process, so the next one resumes."""
    folder = layout.incoming / entry.object
    if any(not (path.is_dir() or path.is_file()) or path.is_symlink() for path in (folder, *folder.rglob("*"))):
        remove_tree(folder)  # `bring` leaves no pipes or links
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)  # `gc` removes downloads that were not resumed for long
    return folder


def written(folder: Path) -> int:
    """Return the bytes of a folder's files on disk; missing pieces are holes. On Windows, where that is unknown, 0."""
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
    """Download the object's files to `folder`. read: gets a file of the remote by path and expected size. patience:
    seconds in all, extrapolated from the speed so far. like: finds local files that may have the same pieces. Raises
    WrongBytes, Absent, Unusable, OSError."""
    wanted = _missing(content, folder, like)
    size = sum(piece.size for piece in wanted)
    begun, left = time.monotonic(), size

    def fetch(piece: Piece) -> int:
        data = read(piece.path, piece.size)
        if not _is(data, piece):
            data = read(piece.path, piece.size)  # a bit may have flipped in transit
        if not _is(data, piece):
            raise WrongBytes(piece.path, data, f"{len(data):,} bytes with another digest")
        for path, offset in wanted[piece]:
            _write(path, offset, data)
        return len(data)

    def count(length: int) -> None:
        nonlocal left
        left -= length
        passed = time.monotonic() - begun
        if passed > SETTLING and passed + left * passed / max(1, size - left) > patience:
            raise Unusable(
                f"too slow: {spell_bytes(int((size - left) / passed))} per second, {spell_bytes(left)} to go"
            )

    lines.for_each(wanted, fetch, count)


def _missing(content: RemoteObject, folder: Path, like: Callable[[str, int], Sequence[Path]]) -> _Places:
    """Copy the pieces that this machine has, and return the others."""
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
    """Copy the pieces that `source` has to `path` and return the others. If they are one file, nothing is copied."""
    left = []
    try:
        stream = open_input(source)
    except OSError:  # collected meanwhile, or a pipe in its place
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
