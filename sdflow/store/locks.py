"""File locks. They spare double work and keep garbage collection off what is in use; no result rests on one."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.store.layout import READ_ONLY, remove_tree

if TYPE_CHECKING:
    from filelock import BaseFileLock

# filelock takes 80 ms to import, more than a fully cached plan: it is imported when a lock is first needed.


def file_lock(path: Path) -> BaseFileLock:
    """A lock that the operating system drops when its process dies. Waiters look every 5 ms."""
    from filelock import FileLock

    _clear(path)
    return FileLock(path, thread_local=False, poll_interval=0.005)


def _clear(path: Path) -> None:
    """Remove what is no file in the place of a lock: a folder, a link or a socket could never be locked."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        remove_tree(path)


def try_lock(path: Path) -> BaseFileLock | None:
    """The lock, held, or None if another process holds it."""
    from filelock import Timeout

    lock = file_lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


@contextmanager
def held(
    path: Path, waiting: Callable[[], None] | None = None, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock at `path`. If another process has it, `waiting` is called once, and `meanwhile` again and again:
    what that raises ends the waiting."""
    from filelock import Timeout

    lock = try_lock(path)
    if lock is None:
        if waiting:
            waiting()
        lock = file_lock(path)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=0.2)
            except Timeout:
                meanwhile()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def held_if_possible(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; on a read-only cache, for those who change nothing, go on without."""
    with ExitStack() as stack:
        try:
            stack.enter_context(held(path))
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
        yield
