"""Replace a folder atomically: a reader finds the old one or the new one, even after a kill."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import sys
import uuid
from pathlib import Path

from sdflow.disk.atomic_write import sync_file
from sdflow.disk.locked_folder import remove_abandoned

_STAGING = ".sdflow-staging"


def staging_place(out: Path) -> Path:
    """A new path next to `out` for its replacement."""
    return out.parent / f".{out.name}.{uuid.uuid4().hex}{_STAGING}"


def remove_stale(out: Path) -> None:
    """Remove leftovers of killed runs next to `out`."""
    remove_abandoned(out.parent, f".{glob.escape(out.name)}.*{_STAGING}")


def sync_tree(folder: Path) -> None:
    """Sync every file in a folder to disk, then the names, without following links."""
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(directory) / name
            if not path.is_symlink():
                sync_file(path)
        sync_directory(Path(directory))


def sync_directory(folder: Path) -> None:
    """Sync the names in a folder to disk. Windows cannot, and journals them itself."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def swap(staging: Path, out: Path) -> None:
    """Replace `out` by `staging`, which then holds the previous folder."""
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
        # Without an atomic exchange (Windows, some network file systems), `out` is briefly missing.
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
    """Exchange two folders atomically: renameat2(2) on Linux, renamex_np(2) on macOS. Raises OSError."""
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
