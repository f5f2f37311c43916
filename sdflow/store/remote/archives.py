"""Archives: a remote in one zip file. It is read in place, and written as a whole."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sdflow import stop
from sdflow.disk.atomic_write import replacing
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import os_errors_as
from sdflow.store.remote.earlier import is_earlier, unpack_earlier
from sdflow.store.remote.spec import RemoteSpec

_TIME = (1980, 1, 1, 0, 0, 0)
"""The same bytes whenever it is packed."""


@contextmanager
def to_write(spec: RemoteSpec) -> Iterator[RemoteSpec]:
    """The remote to push to; of an archive, a folder for the moment, which then takes the archive's place.

    Raises UsageError when the archive cannot be written, and then what was there before is unchanged.
    """
    if spec.archive is None:
        yield spec
        return
    with scratch_folder("archive") as folder:
        yield replace(spec, url=str(folder), name=spec.shown)
        with (
            os_errors_as("cannot be written", spec.archive, "Name another file."),
            replacing(spec.archive) as temporary,
        ):
            _pack(folder, temporary)


@contextmanager
def to_read(spec: RemoteSpec) -> Iterator[RemoteSpec]:
    """The remote to fetch from; of an archive of an earlier sdflow, a folder that it is unpacked into for the moment.

    Raises UsageError for one that is damaged.
    """
    if spec.archive is None or not is_earlier(spec.archive):
        yield spec
        return
    with scratch_folder("archive") as folder:
        unpack_earlier(spec.archive, folder)
        yield replace(spec, url=str(folder), name=spec.shown)


def _pack(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            stop.check()
            name = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _TIME)
            archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)
