"""Files that are whole: a reader finds the old content or the new, whatever is killed when."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sdflow.disk.locked_folder import alone_in

UNFINISHED = ".unfinished"
"""The suffix of a file that is being written. A process that is killed leaves it behind."""


def unfinished(folder: Path) -> Path:
    """A new path in `folder` for a file that is being written."""
    return folder / f".{os.urandom(8).hex()}{UNFINISHED}"


@contextmanager
def replacing(path: Path, *, staging: Path | None = None, durable: bool = False) -> Iterator[Path]:
    """A path to write the new content of `path` to. At the end it takes the place of `path`, whose folder is made.

    staging: a folder on the same file system to write in, by default that of `path`. durable: wait until the disk has
    the content, so that it is whole after a power cut too.
    When the writing fails, `path` is as it was and nothing is left. Raises OSError.
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
    """Wait until the disk has a file's content. Windows wants it open for writing. Raises OSError."""
    with path.open("rb" if sys.platform != "win32" else "r+b") as stream:
        os.fsync(stream.fileno())


def require_makable(folder: Path) -> None:
    """Raises OSError when a folder is not there and cannot be made. To know it, it is made, and removed again."""
    missing = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    finally:
        for path in missing:
            with suppress(OSError):  # somebody else is using it already
                path.rmdir()


def write_whole(path: Path, content: bytes, *, staging: Path | None = None, durable: bool = False) -> None:
    """Give `path` this content in one step, as `replacing` does."""
    with replacing(path, staging=staging, durable=durable) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing_all(paths: Sequence[Path]) -> Iterator[Mapping[Path, Path]]:
    """`paths`, all in one folder, which is made -> new paths to write their contents to. At the end these take their places.

    The first of `paths` is the one that names the others. Several processes may do this at once: the last one's files stay.
    When the writing fails, `paths` are as they were and nothing is left. Raises OSError, at once where one of them is a folder.
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
            with suppress(OSError):  # it was not made, or somebody else uses it already
                each.rmdir()
        raise


def _exchange(written: Mapping[Path, Path]) -> None:
    """Raises OSError; then everything is as before."""
    old = {path: unfinished(path.parent) for path in written}
    try:
        for path, aside in old.items():  # the one that names the others goes first
            if os.path.lexists(path):
                path.rename(aside)
        for path in reversed([*written]):  # and comes last
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
