"""Folders in use while their process lives, and recognizable as abandoned afterwards.

Each is locked before it gets its name, so an unlocked one belongs to an ended process, however new it is. Without
locks, on Windows and some file systems, leftovers of killed processes must be removed by hand.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

_MAKING = ".making"
_MAKING_SECONDS = 60
_SCRATCH = ".scratch"


@contextlib.contextmanager
def locked_folder(folder: Path, mode: int = 0o700) -> Iterator[Path]:
    """Create `folder`, locked while in use, and remove it with its content afterwards.

    mode: before the umask. The default excludes other users: for folders among the system's temporary ones, not for one
    that is renamed to a result.
    """
    making = folder.with_name(f"{folder.name}{_MAKING}")
    lock = None
    try:
        making.mkdir(mode=mode)
        lock = try_lock(making)
        making.rename(folder)
        yield folder
    finally:
        for path in (making, folder):
            shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def scratch_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder named `sdflow-KIND-...` in `parent`, or among the system's temporary ones."""
    with locked_folder((parent or _temporary()) / f"sdflow-{kind}-{uuid.uuid4().hex[:12]}{_SCRATCH}") as folder:
        yield folder


def remove_abandoned_scratch(parent: Path | None = None) -> int:
    """Remove `scratch_folder`s of this user's killed processes. Returns their number."""
    return remove_abandoned(parent or _temporary(), f"sdflow-*{_SCRATCH}")


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def remove_abandoned(parent: Path, pattern: str) -> int:
    """Remove folders of killed processes that match `pattern`. Returns their number."""
    return sum(remove_if_abandoned(folder) for folder in [*parent.glob(pattern), *parent.glob(f"{pattern}{_MAKING}")])


def remove_if_abandoned(folder: Path) -> bool:
    """Remove a folder from `locked_folder` if its process has ended. Returns whether it had."""
    with contextlib.suppress(OSError):  # it belongs to somebody else, or is gone
        found = folder.lstat()
        if folder.is_symlink() or not folder.is_dir() or (sys.platform != "win32" and found.st_uid != os.getuid()):
            return False
        if folder.name.endswith(_MAKING) and time.time() - found.st_mtime < _MAKING_SECONDS:
            return False
        lock = try_lock(folder)
        if lock is None:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        return True
    return False


@contextlib.contextmanager
def alone_in(folder: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a folder's lock, if locks are supported. meanwhile: called while waiting; an exception ends the wait."""
    lock = None
    while True:
        try:
            lock = _lock(folder)
            break
        except BlockingIOError:
            meanwhile()
            time.sleep(0.01)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def try_lock(folder: Path) -> int | None:
    """A descriptor that holds a folder's lock until closed; None if it is taken, or locks are not supported."""
    try:
        return _lock(folder)
    except BlockingIOError:
        return None


def _lock(folder: Path) -> int | None:
    """Raises BlockingIOError if the lock is taken."""
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a network file system without locks
        os.close(descriptor)
        return None
    return descriptor
