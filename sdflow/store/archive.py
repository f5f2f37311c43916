"""Finished actions with their results in one file, to take along to another cache.

The file is a tar archive, compressed with xz. Its first member lists everything else, and carries its own digest:

    structures.json   format; who wrote it; the actions with their facts; the objects with their files
    SHA-256           a file, by the digest of its content; each once, in the order of the list

No name in the archive is taken for a path: where a file goes is what the list of an object says, which is checked against the
object's digest. Nothing goes into a cache before the last byte of the archive was read and every digest holds.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sdflow import stop
from sdflow.artifact import Action, Record
from sdflow.digest import FileEntry
from sdflow.disk.atomic_write import replacing
from sdflow.disk.input_file import open_input
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import UsageError, os_errors_as
from sdflow.store.cache import Cache
from sdflow.store.layout import writing
from sdflow.store.records import BadRecord, Stored, dump, dump_action, load
from sdflow.store.remote.entry import read_entry, require_files

FORMAT = 1
LIST = "structures.json"
MOST_LISTED = 64 << 20
"""Bytes of the list at most."""
MOST = 4 << 30
"""Bytes of all files at most: graphs without weights have a few million."""
_COMPRESSION = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}
"""Graphs of one model for two targets are alike: the dictionary reaches from one to the other."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """What an archive says of itself. about: JSON of whoever wrote it. objects: tree digest -> files."""

    about: Mapping[str, Any]
    entries: tuple[Stored, ...]
    objects: Mapping[str, tuple[FileEntry, ...]]  # sorted

    @property
    def files(self) -> dict[str, int]:
        """SHA-256 -> bytes of every file, in the order in which they lie in the archive."""
        return {entry.sha256: entry.size for files in self.objects.values() for entry in files}


def write_archive(
    path: Path, records: Iterable[Record], about: Mapping[str, Any], check: Callable[[Record], None]
) -> int:
    """Write these results, each once. Returns the bytes of the archive. check: reads a result's files again, and raises.

    Raises UsageError when the archive cannot be written; then what was there before is unchanged.
    """
    chosen = {record.action.digest: record for record in records}
    by_digest = {record.artifact.digest: record.artifact for record in chosen.values()}
    objects = dict(sorted(by_digest.items()))  # as the JSON of the list has them
    stored = [Stored(each.action, each.artifact.digest, each.facts, each.built, 0.0) for each in chosen.values()]
    body = {
        "format": FORMAT,
        "about": about,
        "actions": [load(dump_action(each)) for each in stored],
        "objects": {
            digest: [[entry.path, entry.size, entry.sha256] for entry in artifact.files]
            for digest, artifact in objects.items()
        },
    }
    for record in chosen.values():
        check(record)
    with os_errors_as("cannot be written", path, "Name another file."), replacing(path) as temporary:
        with (
            lzma.open(temporary, "wb", check=lzma.CHECK_SHA256, filters=[_COMPRESSION]) as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            data = dump(body)
            archive.addfile(_member(LIST, len(data)), io.BytesIO(data))
            written = set()
            for artifact in objects.values():
                for entry in artifact.files:
                    if entry.sha256 not in written:
                        written.add(entry.sha256)
                        with (artifact.path / entry.path).open("rb") as file:
                            archive.addfile(_member(entry.sha256, entry.size), file)
                    stop.check()
        return temporary.stat().st_size


def _member(name: str, size: int) -> tarfile.TarInfo:
    """The same bytes whoever writes it, and when."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member


def import_archive(path: Path, cache: Cache, accept: Callable[[Archive], None]) -> tuple[Archive, list[Record]]:
    """Bring an archive's results into a cache. Returns what it says, and those that were not there.

    accept: called with what it says before a file is read; what it raises ends it.
    Raises UsageError for a file that is no archive, is damaged or cut short, or of a newer format; then the cache is as it was.
    """
    with scratch_folder("import") as folder:
        archive = read_archive(path, folder, accept)
        new = []
        with cache.lease():
            for entry in archive.entries:
                with cache.lock(entry.action, meanwhile=stop.check):
                    if cache.lookup(entry.action) is None:
                        new.append(_publish(cache, entry, archive.objects[entry.object], folder))
            cache.notes.note_imported(
                [entry.action for entry in archive.entries], archive.about.get("architectures", ())
            )
    return archive, new


def _publish(cache: Cache, entry: Stored, files: Sequence[FileEntry], folder: Path) -> Record:
    with cache.staging(entry.action) as staging:
        with writing(cache.root):
            for file in files:
                place = staging.files / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / file.sha256, place)
        return staging.publish(entry.facts, entry.built)


def read_archive(path: Path, folder: Path, accept: Callable[[Archive], None] = lambda archive: None) -> Archive:
    """Read an archive to its last byte and put its files into `folder`, by their SHA-256. All as of `import_archive`."""
    try:
        with open_input(path) as file, lzma.open(file) as stream:
            archive = _read(stream, folder, accept)
            while stream.read(_BLOCK):  # to the end: only there its own checksum is compared
                stop.check()
    except FileNotFoundError as error:
        raise UsageError("no such file", where=str(path)) from error
    except _Wrong as error:
        raise UsageError(error.what, where=str(path), remedy=error.remedy) from error
    except (lzma.LZMAError, EOFError, tarfile.TarError, BadRecord, ValueError, OverflowError) as error:
        raise UsageError(
            f"is no archive of structures, or is damaged: {error}", where=str(path), remedy=_AGAIN
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror or error}",
            where=str(error.filename or path),
            remedy="Nothing was imported.",
        ) from error
    return archive


_AGAIN = "Nothing was imported. Copy it again, or write it again: sdflow cache export."


class _Wrong(Exception):
    def __init__(self, what: str, remedy: str = _AGAIN) -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def _read(stream: IO[bytes], folder: Path, accept: Callable[[Archive], None]) -> Archive:
    with tarfile.open(fileobj=stream, mode="r|") as members:
        archive = _list(members)
        accept(archive)
        for sha256, size in archive.files.items():
            content = _open(members, sha256, size)
            _copy(content, folder / sha256, sha256)
        if (more := members.next()) is not None:
            raise _Wrong(f"is damaged: it holds {more.name!r:.80}, which it does not list")
    return archive


def _open(members: tarfile.TarFile, name: str, size: int | None) -> IO[bytes]:
    """The next member, which must be a plain file of this name, and size where one is given."""
    member = members.next()
    if member is None:
        raise _Wrong("is damaged: it ends before what it lists")
    if member.name != name or not member.isreg() or size not in (None, member.size):
        raise _Wrong(f"is no archive of structures, or is damaged: it has {member.name!r:.80} in the place of {name}")
    content = members.extractfile(member)
    assert content is not None, "a plain file has content"
    return content


def _copy(content: IO[bytes], to: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    with to.open("wb") as file:
        while block := content.read(_BLOCK):
            digest.update(block)
            file.write(block)
            stop.check()
    if digest.hexdigest() != sha256:
        raise _Wrong(f"is damaged: a file has the digest {digest.hexdigest()[:12]}, not {sha256[:12]}")


def _list(members: tarfile.TarFile) -> Archive:
    data = _open(members, LIST, None).read(MOST_LISTED + 1)
    if len(data) > MOST_LISTED:
        raise _Wrong("is no archive of structures: its list is too long")
    body = load(data)
    if body.get("format") != FORMAT:
        raise _Wrong(
            f"is of the format {body.get('format')!r:.20}, and this sdflow reads {FORMAT}",
            "Nothing was imported. A newer sdflow wrote it: install that, or write it with this one.",
        )
    try:
        about = dict(body["about"])
        actions = [(Action(each["action"]), dump(each)) for each in body["actions"]]
        entries = tuple(read_entry(data, action.digest) for action, data in actions)
        objects = {str(digest): _files(digest, listed) for digest, listed in body["objects"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"its list cannot be read ({error})") from error
    if {entry.object for entry in entries} != {*objects} or not entries:
        raise BadRecord("its actions and its objects do not belong together")
    if sum(entry.size for files in objects.values() for entry in files) > MOST:
        raise BadRecord(f"it lists more than {MOST:,} bytes")
    return Archive(about, entries, objects)


def _files(digest: str, listed: Sequence[Any]) -> tuple[FileEntry, ...]:
    files = tuple(FileEntry(str(path), int(size), str(sha256)) for path, size, sha256 in listed)
    require_files(files, digest)
    return files
