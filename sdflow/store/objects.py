"""Objects: directories of files named by their tree digest, each with a manifest; and `verify`, which rehashes them."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sdflow.artifact import Artifact
from sdflow.digest import FileEntry, canonical_json, digest_file, digest_tree
from sdflow.disk.atomic_write import sync_file
from sdflow.disk.replace_folder import sync_directory
from sdflow.store.layout import Layout, put_aside, reading, write_file
from sdflow.store.records import BadRecord, Stored, load_action, read_record
from sdflow.store.stat_cache import SHA256, Known, StatCache, identity

READERS, FILE = 0o555, 0o444  # permission masks: sealed means not writable; files are not executable
MANIFEST, FILES = "manifest.json", "files"
_DAMAGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # part of an object is missing, of another kind, or a link loop


class BadTree(Exception):
    """The files are not allowed in an object, or differ from its manifest."""


class AbsentObject(BadTree):
    """The object does not exist."""


def scan(files: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the POSIX path and stat of every file. Raises BadTree for links, devices and files with a second hardlink:
    onnx refuses to read weights through them."""
    with os.scandir(files) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = Path(entry.path)
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode):
                yield from ((f"{entry.name}/{inner}", file) for inner, file in scan(path))
            elif not stat.S_ISREG(found.st_mode):
                raise BadTree(f"{entry.name} is {'a symbolic link' if path.is_symlink() else 'not a regular file'}")
            elif found.st_nlink > 1:
                raise BadTree(f"{entry.name} is a hardlink to another file")
            else:
                yield entry.name, found


def tree_of(files: Path) -> str:
    return digest_tree(FileEntry(name, found.st_size, digest_file(files / name)) for name, found in scan(files))


def seal(files: Path, digests: Mapping[str, str]) -> dict[FileEntry, str]:
    """Flush the files to disk, make them read-only, and hash those not in `digests`. Returns entry -> stat identity, in
    order. Removes empty directories, which have no digest. Read permissions follow the parent folder, and so the umask.
    Raises BadTree if there is no file, or an irregular one."""
    names = [name for name, _ in scan(files)]
    if not names:
        raise BadTree("no file was written")
    readers = stat.S_IMODE(files.parent.stat().st_mode) & READERS
    sealed = {}
    for name in names:
        path = files / name
        sync_file(path)
        path.chmod(readers & FILE)
        sha256 = digests.get(name) or digest_file(path)
        after = path.stat()
        sealed[FileEntry(name, after.st_size, sha256)] = identity(after)
    for directory, _, _ in os.walk(files, topdown=False):
        if not os.listdir(directory):  # noqa: PTH208  (os.walk gives strings)
            os.rmdir(directory)  # noqa: PTH106
            continue
        sync_directory(Path(directory))
        os.chmod(directory, readers)  # noqa: PTH101
    return dict(sorted(sealed.items()))


def write_manifest(directory: Path, entries: tuple[FileEntry, ...]) -> None:
    """Write the read-only manifest next to `files` and flush it to disk."""
    files = [[entry.path, entry.size, entry.sha256] for entry in entries]
    path = directory / MANIFEST
    write_file(path, canonical_json({"format": 1, "digest": digest_tree(entries), "files": files}))
    path.chmod(stat.S_IMODE(directory.stat().st_mode) & READERS & FILE)
    sync_directory(directory)


def read_manifest(directory: Path, digest: str) -> tuple[FileEntry, ...]:
    """Return the files that an object should hold. Raises AbsentObject, or BadTree for a wrong manifest."""
    try:
        with _being_there(directory):
            files = json.loads(read_record(directory / MANIFEST))["files"]
        entries = tuple(FileEntry(str(path), int(size), str(sha)) for path, size, sha in files)
    except (BadRecord, ValueError, KeyError, TypeError) as error:
        raise BadTree(f"the manifest cannot be read ({error})") from error
    if digest_tree(entries) != digest:
        raise BadTree("the manifest does not belong to this object")
    for entry in entries:
        if PurePosixPath(entry.path).is_absolute() or ".." in PurePosixPath(entry.path).parts:
            raise BadTree(f"the manifest names {entry.path}, which is outside the object")
    return entries


def find(layout: Layout, stats: StatCache, digest: str, *, anew: bool = False) -> Artifact:
    """Return the object if names, sizes and content (by stat; anew: by hashing) match. Raises AbsentObject, BadTree."""
    directory = layout.object(digest)
    with _being_there(directory):
        entries = read_manifest(directory, digest)
        there = dict(scan(directory / FILES))
        if difference := there.keys() ^ {entry.path for entry in entries}:
            raise BadTree(f"missing or not listed in the manifest: {', '.join(sorted(difference))}")
        for entry in entries:
            path, found = directory / FILES / entry.path, there[entry.path]
            if not anew and found.st_size != entry.size:
                raise BadTree(f"{entry.path} is not {entry.size} bytes long")
            if anew or stats.recall(path, SHA256, identity(found)) != entry.sha256:
                now, sha256 = identity(path.stat()), digest_file(path)
                if identity(path.stat()) == now and stats.recall(path, SHA256, now) != sha256:
                    stats.remember([Known(path, SHA256, now, sha256)])
                if sha256 != entry.sha256:
                    raise BadTree(f"the content of {entry.path} is not what was published")
    return Artifact(digest, directory / FILES, entries)


@contextmanager
def _being_there(directory: Path) -> Iterator[None]:
    """Distinguish damage from an object that another process removes or replaces meanwhile."""
    try:
        before = directory.stat().st_ino
    except OSError as error:
        if error.errno == errno.ELOOP or directory.is_symlink():
            raise BadTree("it is a dangling symbolic link") from error
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise
        raise AbsentObject(f"no object {directory.name}") from error
    try:
        yield
    except (OSError, BadTree) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGED:
            raise
        if not directory.exists() or directory.stat().st_ino != before:
            raise AbsentObject(f"object {directory.name} was removed") from error
        if isinstance(error, OSError):
            raise BadTree(f"{Path(error.filename).name} is missing or invalid") from error
        raise


def actions(layout: Layout) -> Iterator[tuple[Path, Stored | BadRecord]]:
    """Yield every action file with its content, or with what is wrong with it. Raises OSError."""
    for path in sorted(layout.actions.glob("*/*.json")):
        with suppress(FileNotFoundError):  # deleted meanwhile
            try:
                stored = load_action(read_record(path))
                if layout.action(stored.action.digest) != path:
                    raise BadRecord("it belongs to another action")
            except BadRecord as error:
                yield path, error
            else:
                yield path, stored


@dataclass(frozen=True)
class VerifyReport:
    """Totals of what is intact, and what is damaged."""

    objects: int
    actions: int
    bytes: int
    damaged: tuple[tuple[Path, str], ...]  # with the reason; quarantined, except those in `stuck`
    stuck: tuple[Path, ...] = ()


def verify(layout: Layout, stats: StatCache) -> VerifyReport:
    """Hash every object again and quarantine damaged ones. Raises CacheError if the cache cannot be read."""
    damaged: list[tuple[Path, str]] = []
    stuck: list[Path] = []
    actions_of: defaultdict[str, list[Path]] = defaultdict(list)
    sound: list[int] = []

    def is_damaged(path: Path, why: Exception, *others: Path) -> None:
        damaged.append((path, str(why)))
        if not put_aside(layout, [path, *others], str(why)):
            stuck.append(path)

    with reading(layout.root):
        for path, stored in actions(layout):
            if isinstance(stored, Stored):
                actions_of[stored.object].append(path)
            else:
                is_damaged(path, stored)
        for path in sorted(layout.objects.glob("*/*")):
            try:
                sound.append(find(layout, stats, path.name, anew=True).bytes)
            except AbsentObject:  # collected meanwhile
                continue
            except BadTree as error:
                is_damaged(path, error, *actions_of.pop(path.name, ()))
    return VerifyReport(len(sound), sum(map(len, actions_of.values())), sum(sound), tuple(damaged), tuple(stuck))
