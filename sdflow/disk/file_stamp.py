"""Whether a file is still the one that was looked at, by its stat: size, mtime, inode and ctime.

A stamp is taken before a file is read for the first time, and compared after it was read for the last time. What was read in
between is then what the stamp stands for: ctime cannot be set back, and a file that another was put in the place of has
another inode. What no stamp shows: a write through a memory map of a file whose time the kernel has not renewed yet, and
a folder that is exchanged for another and back between two looks.
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
"""JSON: path, size in bytes, mtime_ns and ctime_ns (0 on Windows, where it means something else), inode."""

TICK_NS = 20_000_000
"""Two writes within one tick of the kernel's clock, at most 10 ms, leave one time. Twice that, to be sure."""
COARSE_TICK_NS = 2_000_000_000
"""That of file systems that keep whole seconds; FAT has every second one."""


def identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    """What of a file's stat must be the same for its content to count as the same: size, mtime, inode, ctime."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, 0 if sys.platform == "win32" else stat.st_ctime_ns


def changed_ns(stat: os.stat_result) -> int:
    """When the file changed last, as far as its stat tells, in nanoseconds since 1970."""
    return stat.st_mtime_ns if sys.platform == "win32" else stat.st_ctime_ns


def file_stamp(path: Path) -> Stamp:
    """The stamp of a file. Waits some milliseconds for one that was written this moment: a later write must show.

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
    """The stamps of all files in a folder, also of those that are reached through links. Raises OSError."""
    found: list[Stamp] = []
    for place in sorted(folder.iterdir()):
        if place.is_dir():
            found += folder_stamps(place)
        elif place.is_file():
            found.append(file_stamp(place))
    return found


def check_stamps(stamps: Iterable[Stamp], since: str = "the build was planned") -> None:
    """Raise InputChanged when a file is no longer the one that its stamp was taken of. since: what it was taken for."""
    for stamp in stamps:
        path = Path(stamp["path"])
        try:
            same = _as_stamp(path, path.stat()) == dict(stamp)
        except OSError as error:
            raise InputChanged(f"cannot be read any more: {error.strerror}", where=str(path)) from error
        if not same:
            raise InputChanged(
                f"has changed since {since}", where=str(path), remedy="Nothing of it was kept. Start the command again."
            )


def _as_stamp(path: Path, stat: os.stat_result) -> dict[str, Any]:
    size, modified, inode, changed = identity(stat)
    return {"path": str(path.absolute()), "size": size, "mtime_ns": modified, "inode": inode, "ctime_ns": changed}
