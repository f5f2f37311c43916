"""Atomic file writes: a reader finds the old content or the new, even after a kill."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sdflow.disk.locked_folder import alone_in

UNFINISHED = ".unfinished"
"""Suffix of a file being written, which a killed process leaves behind."""


def unfinished(folder: Path) -> Path:
    """A new path in `folder` for a file being written."""
    return folder / f".{os.urandom(8).hex()}{UNFINISHED}"


@contextmanager
def replacing(path: Path, *, staging: Path | None = None, durable: bool = False) -> Iterator[Path]:
    """Yield a path for the new content of `path`, which it then replaces. Creates the folder of `path`.

    staging: a folder on the same file system to write in; default: that of `path`. durable: sync to disk, so that the
    content survives a power failure.
    If writing fails, `path` is unchanged and nothing is left behind. Raises OSError.
    """
    temporary = unfinished(path.parent if staging is None else staging)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        if durable:
            sync_file(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Sync a file's content to disk. Windows requires it to be open for writing. Raises OSError."""
    with path.open("rb" if sys.platform != "win32" else "r+b") as stream:
        os.fsync(stream.fileno())


def require_makable(folder: Path) -> None:
    """Raises OSError if a missing folder cannot be created. Tests it by creating and removing the folder."""
    missing = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    finally:
        for path in missing:
            with suppress(OSError):  # another process already uses it
                path.rmdir()


def write_whole(path: Path, content: bytes, *, staging: Path | None = None, durable: bool = False) -> None:
    """Give `path` this content atomically; see `replacing`."""
    with replacing(path, staging=staging, durable=durable) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing_all(paths: Sequence[Path]) -> Iterator[Mapping[Path, Path]]:
    """Yield a map from `paths`, all in one folder, which is created, to new paths for their contents, which then
    replace them.

    The first of `paths` names the others. Several processes may do this at once: the last one's files stay. If writing
    fails, `paths` are unchanged and nothing is left behind. Raises OSError, immediately if one of them is a folder.
    """
    folder = paths[0].parent
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    missing = [each for each in (folder.absolute(), *folder.absolute().parents) if not each.exists()]
    written = {path: unfinished(folder) for path in paths}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield written
        with alone_in(folder):
            _exchange(written)
    except BaseException:
        _remove(written.values())
        for each in missing:
            with suppress(OSError):  # it was not created, or another process already uses it
                each.rmdir()
        raise


def _exchange(written: Mapping[Path, Path]) -> None:
    """Replace the files. Raises OSError with everything unchanged."""
    old = {path: unfinished(path.parent) for path in written}
    try:
        for path, aside in old.items():  # the one that names the others is moved first
            if os.path.lexists(path):
                path.rename(aside)
        for path in reversed([*written]):  # and replaced last
            written[path].rename(path)
    except BaseException:
        for path, new in written.items():
            if not new.exists():
                path.unlink(missing_ok=True)
        for path in reversed(old):
            if os.path.lexists(old[path]):
                old[path].rename(path)
        raise
    finally:
        _remove(old.values())


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
