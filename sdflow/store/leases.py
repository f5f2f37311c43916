"""What garbage collection must leave alone: leases of running builds, and pins of assembled pipelines."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.digest import digest_json
from sdflow.store.layout import Layout, log, replace_file
from sdflow.store.locks import held, try_lock
from sdflow.store.records import BadRecord, dump, load

if TYPE_CHECKING:
    from filelock import BaseFileLock

GUARD = "guard"
"""The lock under which leases grow and under which garbage collection decides and moves: it sees every lease."""


class Lease:
    """Objects that this process uses. It counts for as long as its lock file is held: until `close`, or death."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        name = f"{os.getpid()}-{os.urandom(6).hex()}"
        self._list = layout.leases / f"{name}.txt"
        self._digests: set[str] = set()
        self._thread_guard = threading.Lock()
        with held(layout.lock(GUARD)):
            self._lock: BaseFileLock | None = try_lock(layout.leases / f"{name}.lock")
            self._list.touch()

    def add(self, digest: str) -> None:
        """Protect an object from now on, whether or not it is there yet."""
        with self._thread_guard:
            if digest in self._digests:
                return
            with held(self._layout.lock(GUARD)), self._list.open("a") as stream:
                stream.write(f"{digest}\n")
            self._digests.add(digest)

    def close(self) -> None:
        if self._lock is not None:
            self._list.unlink(missing_ok=True)  # before its lock: a list without one would stay for ever
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None


def leased(layout: Layout) -> dict[str, int]:
    """Object digest -> process that uses it. Removes the leases of dead processes. Call it under the guard lock."""
    users: dict[str, int] = {}
    for path in layout.leases.glob("*.lock"):
        listed = path.with_suffix(".txt")
        lock = try_lock(path)
        if lock is not None:
            listed.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            lock.release()
            continue
        with suppress(FileNotFoundError):  # it ended just now
            users.update(dict.fromkeys(listed.read_text().split(), _process(path)))
    return users


def _process(path: Path) -> int:
    return int(path.name.split("-")[0])


def live_leases(layout: Layout) -> list[int]:
    """The processes that hold a lease, with or without objects. Call it under the guard lock."""
    leased(layout)
    return sorted(_process(path) for path in layout.leases.glob("*.lock"))


@dataclass(frozen=True)
class Pin:
    """What one assembled pipeline uses. `folder` is where it lies; None counts for ever."""

    name: str
    folder: Path | None
    objects: tuple[str, ...]


def pin_path(layout: Layout, name: str, folder: Path | None) -> Path:
    """One pin for each pipeline folder, whatever built it; without a folder, one for each name."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:40]
    identity = digest_json(str(folder) if folder else [name])[:16]
    for other in layout.pins.glob(f"*-{identity}.json"):
        if other.name != f"{slug}-{identity}.json":
            other.unlink(missing_ok=True)
    return layout.pins / f"{slug}-{identity}.json"


def write_pin(layout: Layout, pin: Pin) -> None:
    body = {
        "format": 1,
        "name": pin.name,
        "folder": str(pin.folder) if pin.folder else None,
        "objects": sorted(set(pin.objects)),
    }
    replace_file(layout, pin_path(layout, pin.name, pin.folder), dump(body))


def pins(layout: Layout) -> list[Pin]:
    """The pins that count: those whose pipeline folder still exists."""
    found = []
    for path in sorted(layout.pins.glob("*.json")):
        try:
            body = load(path.read_bytes())
        except FileNotFoundError:
            continue
        except BadRecord as error:
            log.warning("%s does not count: %s; assemble the pipeline again to protect what it uses", path, error)
            continue
        folder = Path(body["folder"]) if body["folder"] else None
        if folder is None or folder.exists():
            found.append(Pin(body["name"], folder, tuple(body["objects"])))
    return found
