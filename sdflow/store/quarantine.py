"""Putting damaged entries aside: out of use at once, there to be looked at, removed by `gc` after a while."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from sdflow.store.layout import Layout, log, move


def put_aside(layout: Layout, paths: list[Path], reason: str) -> bool:
    """Move `paths` to quarantine with a note. Returns False, and says so, if the cache cannot be written."""
    try:
        place, moved = _place(layout), 0
        for path in paths:
            with suppress(FileNotFoundError):  # another process was first
                move(path, place / path.name)
                moved += 1
        if not moved:
            place.rmdir()
            return True
        (place / "reason.txt").write_text("\n".join([reason, *map(str, paths)]) + "\n")
    except OSError as error:
        log.warning("damaged: %s: %s; it cannot be moved to quarantine (%s)", paths[0], reason, error)
        return False
    log.warning("damaged: %s: %s; moved to %s, it will be built again", paths[0], reason, place)
    return True


def keep_bytes(layout: Layout, name: str, data: bytes, reason: str) -> Path | None:
    """Keep what a remote gave in the place of something else. None if the cache cannot be written."""
    try:
        place = _place(layout)
        (place / Path(name).name).write_bytes(data)
        (place / "reason.txt").write_text(f"{reason}\n")
    except OSError as error:
        log.debug("%s is not kept: %s", name, error)
        return None
    return place


def _place(layout: Layout) -> Path:
    """A new folder. Raises OSError."""
    place = layout.quarantine / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(4).hex()}"
    place.mkdir(parents=True)
    return place
