"""Archives: a remote in one zip file, read in place and written as a whole."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from sdflow import stop
from sdflow.digest import inside
from sdflow.disk.atomic_write import replacing
from sdflow.disk.input_file import open_input
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import UsageError, os_errors_as
from sdflow.store.remote import entry as form
from sdflow.store.remote.share import FOLDER
from sdflow.store.remote.spec import RemoteSpec

_TIME = (1980, 1, 1, 0, 0, 0)  # constant, so that archives are reproducible
_REPLACE = "Use another file, or delete this one."
_DAMAGED = (
    *(EOFError, ValueError, OverflowError, RuntimeError, NotImplementedError),  # the last two: encryption
    *(zipfile.BadZipFile, zlib.error),
)


@contextmanager
def to_write(spec: RemoteSpec, *, add: bool = False) -> Iterator[RemoteSpec]:
    """Yield the remote to push to. For an archive, that is a temporary folder, packed at the end. add: keep the
    archive's content. Raises UsageError if the archive cannot be written; the existing one is then unchanged."""
    if spec.archive is None:
        yield spec
        return
    require_archive(spec)
    with scratch_folder("archive") as folder:
        if add and _is_there(spec.archive):
            with _reading(spec.archive, _REPLACE) as file, zipfile.ZipFile(file) as archive:
                _unpack(archive, folder)
        yield replace(spec, url=str(folder), name=spec.shown)
        with (
            os_errors_as("cannot be written", spec.archive, "Use another file."),
            replacing(spec.archive) as temporary,
        ):
            _pack(folder, temporary)


def require_archive(spec: RemoteSpec) -> None:
    """Raise UsageError if writing would replace a file that is not an archive."""
    if spec.archive is None or not _is_there(spec.archive):
        return
    with _reading(spec.archive, _REPLACE) as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if all(name.startswith(f"{FOLDER}/") for name in archive.namelist()):
                    return
    raise UsageError(
        "this file was not written by sdflow, so it is not replaced",
        where=str(spec.archive),
        remedy="Use another file.",
    )


def _is_there(path: Path) -> bool:
    return path.exists() and (not path.is_file() or path.stat().st_size > 0)


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[IO[bytes]]:
    """Open an archive. Raises UsageError if it is no regular file, or the body finds it damaged."""
    try:
        with os_errors_as("cannot be read", path, remedy):
            file = open_input(path)
        with file, os_errors_as("cannot be unpacked", path, "Check the disk and the permissions, then run again."):
            yield file
    except _DAMAGED as error:
        raise UsageError(f"is not an archive, or is damaged: {error}", where=str(path), remedy=remedy) from error


def _unpack(archive: zipfile.ZipFile, folder: Path) -> None:
    for member in archive.infolist():
        stop.check()
        if member.is_dir():
            continue
        if not inside(member.filename) or member.file_size > form.MOST_OF_MANIFEST:
            raise zipfile.BadZipFile(f"it contains {member.filename!r:.80} with {member.file_size:,} bytes")
        place = folder / member.filename
        place.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as stream:
            place.write_bytes(stream.read(form.MOST_OF_MANIFEST))


def _pack(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            stop.check()
            name = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _TIME)
            archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED, 9)
