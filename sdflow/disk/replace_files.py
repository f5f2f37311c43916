"""Replaces files that belong together: all of them are the new ones, or all are what was there.

A process that is killed in the moment of the exchange leaves the first one away, without which nobody reads the others.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sdflow.disk.atomic_write import unfinished
from sdflow.disk.locked_folder import alone_in


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
