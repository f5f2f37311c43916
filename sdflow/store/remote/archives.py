"""Archives: a remote in one zip file. It is read in place, and written as a whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sdflow import stop
from sdflow.digest import inside
from sdflow.disk.atomic_write import replacing
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import UsageError, os_errors_as
from sdflow.store.remote.earlier import is_earlier, unpack_earlier
from sdflow.store.remote.entry import MOST_OF_MANIFEST
from sdflow.store.remote.share import FOLDER
from sdflow.store.remote.spec import RemoteSpec

_TIME = (1980, 1, 1, 0, 0, 0)
"""The same bytes whenever it is packed."""


@contextmanager
def to_write(spec: RemoteSpec, *, add: bool = False) -> Iterator[RemoteSpec]:
    """The remote to push to; of an archive, a folder for the moment, which then takes the archive's place. add: what the archive
    has stays in it.

    Raises UsageError when the archive cannot be written, and then what was there before is unchanged.
    """
    if spec.archive is None:
        yield spec
        return
    require_archive(spec)
    with scratch_folder("archive") as folder:
        if add and _is_there(spec.archive):
            _unpack(spec.archive, folder)
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


def require_archive(spec: RemoteSpec) -> None:
    """Raises UsageError where another file than an archive would be replaced."""
    if spec.archive is None or not _is_there(spec.archive) or is_earlier(spec.archive):
        return
    if zipfile.is_zipfile(spec.archive):
        with _opened(spec.archive) as archive:
            if all(name.startswith(f"{FOLDER}/") for name in archive.namelist()):
                return
    raise UsageError(
        "this file is not an archive that sdflow wrote, and is not replaced",
        where=str(spec.archive),
        remedy="Name another file.",
    )


def _is_there(path: Path) -> bool:
    """Whether something is to be lost."""
    return path.exists() and (not path.is_file() or path.stat().st_size > 0)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    remedy = "Name another file, or delete this one."
    try:
        with os_errors_as("cannot be read", path, remedy), zipfile.ZipFile(path) as archive:
            yield archive
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:  # one is for a password
        raise UsageError(f"the archive is damaged: {error}", where=str(path), remedy=remedy) from error


def _unpack(path: Path, folder: Path) -> None:
    """Write the remote that an archive is into a folder. Raises UsageError for one that is damaged."""
    if is_earlier(path):
        unpack_earlier(path, folder)
        return
    with _opened(path) as archive:
        for member in archive.infolist():
            stop.check()
            if member.is_dir():
                continue
            if not inside(member.filename) or member.file_size > MOST_OF_MANIFEST:
                raise zipfile.BadZipFile(f"it holds {member.filename!r:.80} of {member.file_size:,} bytes")
            place = folder / member.filename
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as stream:
                place.write_bytes(stream.read(MOST_OF_MANIFEST))


def _pack(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            stop.check()
            name = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _TIME)
            archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)
