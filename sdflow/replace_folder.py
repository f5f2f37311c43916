"""Replaces a folder by another in one step: a reader finds the old one or the new, whatever is killed when."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_STALE_SECONDS = 60


@contextlib.contextmanager
def staging_beside(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, locked while in use, removed afterwards with whatever it then holds."""
    folder = out.parent / f".{out.name}.{uuid.uuid4().hex}.sdflow-staging"
    folder.mkdir()
    lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_stale(out: Path) -> None:
    """Remove what killed runs left beside `out`. A folder that is locked, or younger than a minute, is in use."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.*.sdflow-staging*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.lstat().st_mtime > _STALE_SECONDS and (lock := _lock(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A lock on a folder that ends with the process; None when another process holds it, or on Windows."""
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def swap(staging: Path, out: Path) -> None:
    """Put `staging` in the place of `out`; what was there is then in `staging`."""
    while True:
        if not out.exists() or not any(out.iterdir()):
            try:
                if out.exists() and sys.platform == "win32":
                    out.rmdir()
                staging.rename(out)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another process was faster
        try:
            _exchange(staging, out)
            return
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
        # Without an exchange (Windows, some network file systems) there is a moment with no pipeline at `out`.
        old = staging.with_name(staging.name + ".old")
        out.rename(old)
        try:
            staging.rename(out)
        except OSError:
            old.rename(out)
            raise
        old.rename(staging)
        return


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step: renameat2(2) on Linux, renamex_np(2) on macOS. Raises OSError."""
    at_working_directory, exchange = -100, 2  # AT_FDCWD; RENAME_EXCHANGE and RENAME_SWAP
    library = None if sys.platform == "win32" else ctypes.CDLL(None, use_errno=True)
    if library is not None and hasattr(library, "renameat2"):
        names = os.fsencode(one), at_working_directory, os.fsencode(other)
        failed = library.renameat2(at_working_directory, *names, exchange)
    elif library is not None and hasattr(library, "renamex_np"):
        failed = library.renamex_np(os.fsencode(one), os.fsencode(other), exchange)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))
