"""Folders that are in use for as long as their process lives, and are known as rubbish afterwards.

Each is locked before it gets its name, so that whoever finds it unlocked knows that its process has ended, however young it
is. Not on Windows, nor on file systems without locks: there, what a killed process leaves must be removed by hand.
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
    """The new folder `folder`, locked while in use, removed afterwards with whatever it then holds.

    mode: before the umask. The default keeps other users out: for folders among the system's temporary ones, not for one that
    is renamed to a result.
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
    """A folder in `parent`, or among the system's temporary ones; `sdflow-KIND-` begins its name."""
    with locked_folder((parent or _temporary()) / f"sdflow-{kind}-{uuid.uuid4().hex[:12]}{_SCRATCH}") as folder:
        yield folder


def remove_abandoned_scratch(parent: Path | None = None) -> int:
    """Remove what `scratch_folder` made there for this user's processes that were killed; returns how many there were."""
    return remove_abandoned(parent or _temporary(), f"sdflow-*{_SCRATCH}")


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def remove_abandoned(parent: Path, pattern: str) -> int:
    """Remove the folders of killed processes whose name is like `pattern`; returns how many there were."""
    return sum(remove_if_abandoned(folder) for folder in [*parent.glob(pattern), *parent.glob(f"{pattern}{_MAKING}")])


def remove_if_abandoned(folder: Path) -> bool:
    """Remove a folder that `locked_folder` made, if its process has ended; returns whether it had."""
    with contextlib.suppress(OSError):  # it is somebody else's, or gone
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
    """Hold a folder's lock, where there are locks. meanwhile: called while another has it; what it raises ends the waiting."""
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
    """A descriptor that holds a folder's lock until it is closed; None when another has it, or where there are no locks."""
    try:
        return _lock(folder)
    except BlockingIOError:
        return None


def _lock(folder: Path) -> int | None:
    """Raises BlockingIOError when another has it."""
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
