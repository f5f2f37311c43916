"""Detect changes of a file by its stat: size, mtime, inode and ctime.

A stamp is taken before a file is first read, and compared after the last read; the content read in between then belongs
to the stamp: ctime cannot be set back, and a replaced file has another inode. Stamps cannot detect a write through a
memory map whose time the kernel has not updated yet, nor a folder that is swapped for another and back between the two
checks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sdflow.errors import InputChanged

Stamp = Mapping[str, Any]
"""JSON: path, size in bytes, mtime_ns and ctime_ns (0 on Windows, where it differs in meaning), inode."""

TICK_NS = 20_000_000
"""Two writes within one tick of the kernel's clock, at most 10 ms, have the same time. Twice that, for safety."""
COARSE_TICK_NS = 2_000_000_000
"""The same for file systems with whole seconds; FAT has two-second steps."""


def identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    """The stat fields that identify a file's content: size, mtime, inode, ctime."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, 0 if sys.platform == "win32" else stat.st_ctime_ns


def changed_ns(stat: os.stat_result) -> int:
    """The file's last change according to its stat, in nanoseconds since 1970."""
    return stat.st_mtime_ns if sys.platform == "win32" else stat.st_ctime_ns


def file_stamp(path: Path) -> Stamp:
    """The stamp of a file. Waits some milliseconds if it was just written, so that a later write changes the stamp.

    Raises OSError.
    """
    end = time.monotonic_ns() + COARSE_TICK_NS
    while True:
        stat = path.stat()
        changed = changed_ns(stat)
        tick = TICK_NS if changed % 1_000_000_000 else COARSE_TICK_NS
        age = time.time_ns() - changed
        if age >= tick or age < -COARSE_TICK_NS or time.monotonic_ns() > end:
            return _as_stamp(path, stat)
        time.sleep(TICK_NS / 4e9)


def folder_stamps(folder: Path) -> list[Stamp]:
    """The stamps of all files in a folder, following links. Raises OSError."""
    found: list[Stamp] = []
    for place in sorted(folder.iterdir()):
        if place.is_dir():
            found += folder_stamps(place)
        elif place.is_file():
            found.append(file_stamp(place))
    return found


def check_stamps(stamps: Iterable[Stamp], since: str = "the build was planned") -> None:
    """Raise InputChanged if a file no longer matches its stamp. since: when the stamp was taken, for the message."""
    for stamp in stamps:
        path = Path(stamp["path"])
        try:
            same = _as_stamp(path, path.stat()) == dict(stamp)
        except OSError as error:
            raise InputChanged(f"cannot be read any more: {error.strerror}", where=str(path)) from error
        if not same:
            raise InputChanged(
                f"has changed since {since}", where=str(path), remedy="Nothing was saved. Run the command again."
            )


def _as_stamp(path: Path, stat: os.stat_result) -> dict[str, Any]:
    size, modified, inode, changed = identity(stat)
    return {"path": str(path.absolute()), "size": size, "mtime_ns": modified, "inode": inode, "ctime_ns": changed}
