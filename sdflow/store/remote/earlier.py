"""Archives of an earlier sdflow, which were tar files: unpacked into the folder of a remote, as they are written today.

    structures.json   format 1; who wrote it; the actions with their facts; the objects with their files
    SHA-256           a file, by the digest of its content; each once, in the order of the list

No name in the archive is taken for a path.
"""

from __future__ import annotations

import hashlib
import lzma
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from sdflow import stop
from sdflow.artifact import Action
from sdflow.digest import FileEntry
from sdflow.disk.input_file import open_input
from sdflow.errors import UsageError, os_errors_as
from sdflow.store.records import BadRecord, dump, load
from sdflow.store.remote.entry import (
    LIST,
    Piece,
    RemoteObject,
    action_path,
    dump_list,
    dump_object,
    object_path,
    read_entry,
    require_files,
    sizes,
)
from sdflow.store.remote.share import Share
from sdflow.store.remote.spec import RemoteSpec

_XZ = b"\xfd7zXZ\0"
_MOST_LISTED = 64 << 20
_MOST = 4 << 30
"""Bytes of the list, and of all files, at most."""
_BLOCK = 1 << 20


def is_earlier(path: Path) -> bool:
    """Whether an archive is of that kind. Raises UsageError where it cannot be read."""
    with os_errors_as("cannot be read", path, "Name an archive of `sdflow cache export`."), open_input(path) as file:
        return file.read(len(_XZ)) == _XZ


def unpack_earlier(path: Path, folder: Path) -> None:
    """Write the remote that the archive is into `folder`. Raises UsageError for one that is damaged or cut short."""
    share = Share(RemoteSpec(str(folder)))
    try:
        with open_input(path) as file, lzma.open(file) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as members:
                _unpack(members, share)
            while stream.read(_BLOCK):  # to the end: only there its own checksum is compared
                stop.check()
    except (OSError, lzma.LZMAError, EOFError, tarfile.TarError, BadRecord, ValueError, OverflowError) as error:
        remedy = "Nothing was imported. Copy it again, or write it again: sdflow cache export."
        raise UsageError(
            f"is no archive of structures, or is damaged: {error}", where=str(path), remedy=remedy
        ) from error


def _unpack(members: tarfile.TarFile, share: Share) -> None:
    body = load(_open(members, LIST, _MOST_LISTED).read())
    if body.get("format") != 1:
        raise BadRecord(f"it is of the format {body.get('format')!r:.20}")
    try:
        about = dict(body["about"])
        records = {Action(each["action"]).digest: dump(each) for each in body["actions"]}
        entries = [read_entry(data, digest) for digest, data in records.items()]
        objects = {str(digest): _files(digest, listed) for digest, listed in body["objects"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"its list cannot be read ({error})") from error
    if {entry.object for entry in entries} != {*objects}:
        raise BadRecord("its actions and its objects do not belong together")
    if sum(entry.size for files in objects.values() for entry in files) > _MOST:
        raise BadRecord(f"it lists more than {_MOST:,} bytes")
    pieces: dict[str, tuple[Piece, ...]] = {}
    for entry in {entry.sha256: entry for files in objects.values() for entry in files}.values():
        pieces[entry.sha256] = tuple(_pieces(_open(members, entry.sha256, entry.size), entry, share))
    if (more := members.next()) is not None:
        raise BadRecord(f"it holds {more.name!r:.80}, which it does not list")
    for tree, files in objects.items():
        content = RemoteObject(tuple((entry, pieces[entry.sha256]) for entry in files))
        share.write(object_path(tree), dump_object(tree, content))
    for digest, data in records.items():
        share.write(action_path(digest), data)
    share.write(LIST, dump_list(about, [*records]))


def _open(members: tarfile.TarFile, name: str, size: int) -> IO[bytes]:
    """The next member, which must be a plain file of this name and of that size, the list of that at most."""
    member = members.next()
    if member is None:
        raise BadRecord("it ends before what it lists")
    fits = member.size <= size if name == LIST else member.size == size
    if member.name != name or not member.isreg() or not fits:
        raise BadRecord(f"it has {member.name!r:.80} in the place of {name}")
    content = members.extractfile(member)
    assert content is not None, "a plain file has content"
    return content


def _pieces(content: IO[bytes], entry: FileEntry, share: Share) -> list[Piece]:
    found, whole = [], hashlib.sha256()
    for size in sizes(entry.size, ()):
        stop.check()
        data = content.read(size)
        whole.update(data)
        found.append(Piece(len(data), hashlib.sha256(data).hexdigest()))
        share.write(found[-1].path, data)
    if whole.hexdigest() != entry.sha256:
        raise BadRecord(f"a file has the digest {whole.hexdigest()[:12]}, not {entry.sha256[:12]}")
    return found


def _files(digest: str, listed: Sequence[Any]) -> tuple[FileEntry, ...]:
    files = tuple(FileEntry(str(path), int(size), str(sha256)) for path, size, sha256 in listed)
    require_files(files, digest)
    return files
