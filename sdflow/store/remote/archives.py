"""Archives: a remote in one zip file, read in place and written as a whole.

Archives of an earlier sdflow are xz-compressed tar files, converted to a folder in today's layout. Their member names
are never used as paths:

    structures.json   format 1: writer, actions with facts, objects with files
    SHA-256           a file named by its digest; each once, in the order of the list
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from sdflow import stop
from sdflow.artifact import Action
from sdflow.digest import FileEntry, inside
from sdflow.disk.atomic_write import replacing
from sdflow.disk.input_file import open_input
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import UsageError, os_errors_as
from sdflow.store.records import BadRecord, dump, load
from sdflow.store.remote import entry as form
from sdflow.store.remote.share import FOLDER, Share
from sdflow.store.remote.spec import RemoteSpec

_TIME = (1980, 1, 1, 0, 0, 0)  # constant, so that archives are reproducible
_XZ = b"\xfd7zXZ\0"
_MOST_LISTED, _MOST = 64 << 20, 4 << 30  # bytes of an earlier archive's list, and of all its files
_BLOCK = 1 << 20
_REPLACE = "Use another file, or delete this one."
_DAMAGED = (
    *(EOFError, ValueError, OverflowError, RuntimeError, NotImplementedError),  # the last two: encryption
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError, BadRecord),
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
            _unpack(spec.archive, folder, _REPLACE)
        yield replace(spec, url=str(folder), name=spec.shown)
        with (
            os_errors_as("cannot be written", spec.archive, "Use another file."),
            replacing(spec.archive) as temporary,
        ):
            _pack(folder, temporary)


@contextmanager
def to_read(spec: RemoteSpec) -> Iterator[RemoteSpec]:
    """Yield the remote to fetch from; an earlier sdflow's archive is unpacked first. Raises UsageError if damaged."""
    if spec.archive is None or not _is_earlier(spec.archive):
        yield spec
        return
    with scratch_folder("archive") as folder:
        _unpack(spec.archive, folder, "Nothing was imported. Copy it again, or recreate it with `sdflow cache export`.")
        yield replace(spec, url=str(folder), name=spec.shown)


def require_archive(spec: RemoteSpec) -> None:
    """Raise UsageError if writing would replace a file that is not an archive."""
    if spec.archive is None or not _is_there(spec.archive) or _is_earlier(spec.archive):
        return
    with _reading(spec.archive, _REPLACE):
        if zipfile.is_zipfile(spec.archive):
            with zipfile.ZipFile(spec.archive) as archive:
                if all(name.startswith(f"{FOLDER}/") for name in archive.namelist()):
                    return
    raise UsageError(
        "this file was not written by sdflow, so it is not replaced",
        where=str(spec.archive),
        remedy="Use another file.",
    )


def _is_there(path: Path) -> bool:
    return path.exists() and (not path.is_file() or path.stat().st_size > 0)


def _is_earlier(path: Path) -> bool:
    """Return whether an earlier sdflow wrote the archive. Raises UsageError if it cannot be read."""
    with (
        os_errors_as("cannot be read", path, "Pass an archive written by `sdflow cache export`."),
        open_input(path) as file,
    ):
        return file.read(len(_XZ)) == _XZ


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    try:
        with os_errors_as("cannot be unpacked", path, "Check the disk and the permissions, then run again."):
            yield
    except _DAMAGED as error:
        raise UsageError(f"is not an archive, or is damaged: {error}", where=str(path), remedy=remedy) from error


def _unpack(path: Path, folder: Path, remedy: str) -> None:
    """Unpack an archive into a folder, as a remote. Raises UsageError if it is damaged."""
    with _reading(path, remedy):
        if not _is_earlier(path):
            with zipfile.ZipFile(path) as archive:
                _unpack_zip(archive, folder)
            return
        with open_input(path) as file, lzma.open(file) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as members:
                _unpack_earlier(members, Share(RemoteSpec(str(folder))))
            while stream.read(_BLOCK):  # xz compares its checksum at the end of the stream
                stop.check()


def _unpack_zip(archive: zipfile.ZipFile, folder: Path) -> None:
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


def _unpack_earlier(members: tarfile.TarFile, share: Share) -> None:
    body = load(_open(members, form.LIST, _MOST_LISTED).read())
    if body.get("format") != 1:
        raise BadRecord(f"it has the format {body.get('format')!r:.20}")
    try:
        about = dict(body["about"])
        records = {Action(each["action"]).digest: dump(each) for each in body["actions"]}
        entries = [form.read_entry(data, digest) for digest, data in records.items()]
        objects = {str(digest): _files(digest, listed) for digest, listed in body["objects"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"its list cannot be read ({error})") from error
    if {entry.object for entry in entries} != {*objects}:
        raise BadRecord("its actions do not match its objects")
    if sum(entry.size for files in objects.values() for entry in files) > _MOST:
        raise BadRecord(f"it lists more than {_MOST:,} bytes")
    pieces: dict[str, tuple[form.Piece, ...]] = {}
    for entry in {entry.sha256: entry for files in objects.values() for entry in files}.values():
        pieces[entry.sha256] = _pieces(_open(members, entry.sha256, entry.size), entry, share)
    if (more := members.next()) is not None:
        raise BadRecord(f"it contains {more.name!r:.80}, which is not in its list")
    for tree, files in objects.items():
        content = form.RemoteObject(tuple((entry, pieces[entry.sha256]) for entry in files))
        share.write(form.object_path(tree), form.dump_object(tree, content))
    for digest, data in records.items():
        share.write(form.action_path(digest), data)
    share.write(form.LIST, form.dump_list(about, [*records]))


def _open(members: tarfile.TarFile, name: str, size: int) -> IO[bytes]:
    """Open the next member: a regular file of this name and size (for the list, the maximum). Raises BadRecord."""
    member = members.next()
    if member is None:
        raise BadRecord("it ends before the files in its list")
    fits = member.size <= size if name == form.LIST else member.size == size
    content = members.extractfile(member) if member.name == name and member.isreg() and fits else None
    if content is None:
        raise BadRecord(f"it has {member.name!r:.80} instead of {name}")
    return content


def _pieces(content: IO[bytes], entry: FileEntry, share: Share) -> tuple[form.Piece, ...]:
    found, whole = [], hashlib.sha256()
    for size in form.sizes(entry.size, ()):
        stop.check()
        data = content.read(size)
        whole.update(data)
        found.append(form.Piece(len(data), hashlib.sha256(data).hexdigest()))
        share.write(found[-1].path, data)
    if whole.hexdigest() != entry.sha256:
        raise BadRecord(f"a file has the digest {whole.hexdigest()[:12]}, not {entry.sha256[:12]}")
    return tuple(found)


def _files(digest: str, listed: Sequence[Any]) -> tuple[FileEntry, ...]:
    files = tuple(FileEntry(str(path), int(size), str(sha256)) for path, size, sha256 in listed)
    form.require_files(files, digest)
    return files
