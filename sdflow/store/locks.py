"""File locks, and leases that protect what running builds use from `gc`. Correctness never depends on a lock."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.disk.input_file import read_input
from sdflow.store.layout import READ_ONLY, Layout, remove_tree

if TYPE_CHECKING:
    from filelock import BaseFileLock

MOST_OF_A_LIST = 64 << 20  # bytes of a lease's list: a million objects
GUARD = "guard"  # held while leases grow and while collection decides and moves, so that collection sees every lease
# filelock takes 80 ms to import, longer than a fully cached plan, so functions import it on first use.


def file_lock(path: Path) -> BaseFileLock:
    """Return a lock that the operating system releases when the process dies. Waiters poll every 5 ms."""
    from filelock import FileLock

    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            remove_tree(path)  # a folder, link or socket in its place could never be locked
    return FileLock(path, thread_local=False, poll_interval=0.005)


def try_lock(path: Path, *, if_possible: bool = False) -> BaseFileLock | None:
    """Acquire a lock, or return None if another process holds it. if_possible: return None on a read-only cache too."""
    from filelock import Timeout

    lock = file_lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except OSError as error:
        if not if_possible or error.errno not in READ_ONLY:
            raise
        return None
    return lock


@contextmanager
def held(
    path: Path,
    waiting: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    if_possible: bool = False,
) -> Iterator[None]:
    """Hold the lock at `path`. While another process holds it, call `waiting` once and `meanwhile` repeatedly, whose
    exceptions end the wait. if_possible: on a read-only cache, proceed without the lock (readers only)."""
    from filelock import Timeout

    lock = None
    try:
        lock = try_lock(path)
        if lock is None:
            waiting()
            lock = file_lock(path)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=0.2)
            except Timeout:
                meanwhile()
    except OSError as error:
        if not if_possible or error.errno not in READ_ONLY:
            raise
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


class Lease:
    """Objects that this process uses. Counts while its lock file is held: until `close`, or the process dies."""

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
        """Protect an object, which need not exist yet."""
        with self._thread_guard:
            if digest in self._digests:
                return
            with held(self._layout.lock(GUARD)), self._list.open("a") as stream:
                stream.write(f"{digest}\n")
            self._digests.add(digest)

    def close(self) -> None:
        if self._lock is not None:
            self._list.unlink(missing_ok=True)  # before its lock: a list without a lock would stay forever
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None


def leased(layout: Layout, *, tidy: bool = True) -> tuple[set[str], list[int]]:
    """Return the leased objects and their processes. Call it under the guard lock. tidy: remove the leases of dead
    processes; without it, every lease counts on a read-only cache."""
    objects: set[str] = set()
    users = []
    for path in layout.leases.glob("*.lock"):
        listed = path.with_suffix(".txt")
        lock = try_lock(path, if_possible=not tidy)
        if lock is not None:
            if tidy:
                listed.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            lock.release()
            continue
        number = path.name.split("-")[0]
        users.append(int(number) if number.isdecimal() and len(number) < 20 else 0)
        with suppress(FileNotFoundError):  # the process ended meanwhile
            objects.update(read_input(listed, MOST_OF_A_LIST).decode(errors="replace").split())
    return objects, sorted(users)
