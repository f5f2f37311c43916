"""Paths of a cache directory, and how to write there without ever leaving a partial file.

CACHEDIR.TAG  .gitignore
v1/objects/ab/<tree digest>/{manifest.json, files/}    output of passes; read-only
   actions/ab/<action digest>.json                     the commit point: the action produced the object
   steps/<digest of step id>{,-failed}.json            last action of a step, and its failure since, for `explain`
   staging/ quarantine/ trash/ locks/ leases/ pins/
   incoming/<tree digest>/                             partial downloads from a remote cache
   imported/<digest of an action without versions>.json   package versions that imported structures were built with
   outputs/                                            folders that pipelines are assembled in
   stat.sqlite
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from sdflow.disk.atomic_write import write_whole
from sdflow.disk.input_file import is_regular, read_input
from sdflow.disk.replace_folder import sync_directory
from sdflow.errors import CacheError, os_errors_as

log = logging.getLogger("sdflow.store")

SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"  # https://bford.info/cachedir/
TAG = f"{SIGNATURE}\n# This file is a cache directory tag created by sdflow.\n# See https://bford.info/cachedir/\n"

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class Layout:
    """The paths of a cache. The constructor does not touch the disk; `ensure` creates the directories."""

    def __init__(self, root: Path) -> None:
        self.root, self.tag, self.own = root, root / "CACHEDIR.TAG", root / "v1"
        self.contents = [self.own / name for name in ("objects", "actions", "steps", "pins", "imported", "outputs")]
        self.objects, self.actions, self.steps, self.pins, self.imported, self.outputs = self.contents
        self.services = [self.own / name for name in ("staging", "quarantine", "trash", "locks", "leases")]
        self.staging, self.quarantine, self.trash, self.locks, self.leases = self.services
        self.incoming, self.stat = self.own / "incoming", self.own / "stat.sqlite"

    def object(self, digest: str) -> Path:
        return self.objects / digest[:2] / digest

    def action(self, digest: str) -> Path:
        return self.actions / digest[:2] / f"{digest}.json"

    def lock(self, name: str) -> Path:
        return self.locks / f"{name}.lock"

    def is_ours(self) -> bool:
        try:
            text = read_input(self.tag)
        except OSError as error:  # another process may make a missing tag meanwhile
            if not isinstance(error, FileNotFoundError) and is_regular(self.tag):
                raise
            return False  # missing, a pipe, or a folder
        return text.startswith(SIGNATURE.encode()) and b"sdflow" in text

    def ensure(self) -> None:
        """Create the directories, the tag first. Raises CacheError if the root is foreign or read-only."""
        with writing(self.root):
            if not self.is_ours():
                self._adopt()
            for folder in (*self.contents, *self.services):
                make_folder(folder)

    def foreign(self) -> list[str]:
        """Return the names in the root that are neither ours nor dot files."""
        own = {self.own.name, "lost+found"}
        if not self.tag.is_dir() and not is_regular(self.tag):
            own.add(self.tag.name)  # a pipe or a dangling link is nobody's tag
        return sorted(name for name in os.listdir(self.root) if not name.startswith(".") and name not in own)  # noqa: PTH208

    def _adopt(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        foreign = self.foreign()
        if foreign and not self.is_ours():  # another process may have just created the cache
            raise CacheError(
                f"this folder contains other files ({', '.join(foreign[:3])}) and no CACHEDIR.TAG of sdflow",
                where=str(self.root),
                remedy="Use an empty or new folder as the cache.",
            )
        ignore = self.root / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
        temporary = self.root / f".tag-{os.urandom(8).hex()}"
        write_file(temporary, TAG.encode())
        temporary.replace(self.tag)


def cache_error(root: Path, error: OSError, *, written: int | None = None) -> CacheError:
    """Return the CacheError that explains an OSError to the user. written: bytes written before it."""
    if error.errno in FULL:
        so_far = f" after {written:,} bytes" if written else ""
        limit = "the file size limit of this process is reached" if error.errno == errno.EFBIG else "the disk is full"
        what = f"{limit}{so_far}: {free_bytes(root):,} bytes are free ({error.strerror})"
        remedy = (
            "Nothing was lost: finished steps are kept. Free some space, for example with "
            "`sdflow cache gc --max-size`, or put the cache on a larger disk; the next run resumes from here."
        )
    elif error.errno in READ_ONLY:
        what = f"the cache cannot be written ({error.strerror})"
        remedy = "Its entries can still be used. To build more, make it writable or use another cache folder."
    else:
        what = f"the cache cannot be read or written ({error.strerror or error})"
        remedy = "Check the disk and the permissions, or use another cache folder."
    return CacheError(what, where=str(error.filename or root), remedy=remedy)


def free_bytes(root: Path) -> int:
    """Return the free bytes of the file system under `root`; 0 if unknown."""
    for place in (root, *root.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


@contextmanager
def writing(root: Path, *, written: Callable[[], int] = lambda: 0) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cache_error(root, error, written=written()) from error


def reading(root: Path) -> AbstractContextManager[None]:
    remedy = "Check the permissions and the disk, or use another cache folder."
    return os_errors_as("the cache cannot be read", root, remedy, CacheError, of_many=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and fsync it."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def make_folder(path: Path) -> None:
    """Create a folder of the cache, replacing a file, pipe or dangling link in its place. Raises OSError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        for each in (path.parent, path):
            if not each.is_dir():
                each.unlink(missing_ok=True)
        path.mkdir(parents=True, exist_ok=True)


def replace_file(layout: Layout, path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace a file atomically: readers see the old or the new content. durable: fsync it."""
    if path.is_dir():
        discard(layout, path)
    write_whole(path, data, staging=layout.staging, durable=durable)
    if durable:
        sync_directory(path.parent)


def move(source: Path, destination: Path) -> None:
    """Rename. A sealed directory is made writable first: otherwise only root can change its parent."""
    if source.is_dir():
        source.chmod(stat.S_IMODE(source.stat().st_mode) | 0o700)
    source.replace(destination)


def discard(layout: Layout, path: Path) -> None:
    """Remove a file or directory, if it exists: rename it into the trash, then delete it."""
    layout.trash.mkdir(parents=True, exist_ok=True)
    grave = layout.trash / f"{path.name[:24]}-{os.urandom(8).hex()}"
    with suppress(FileNotFoundError):
        move(path, grave)
        remove_tree(grave)


def remove_tree(path: Path) -> None:
    """Remove a file or directory, even sealed ones. Another process may remove it concurrently."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    for directory, _, names in os.walk(path):
        with suppress(FileNotFoundError):
            Path(directory).chmod(0o700)
        if sys.platform == "win32":  # Windows does not remove read-only files
            for name in names:
                (Path(directory) / name).chmod(0o600)

    def tolerate(function: Any, place: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    shutil.rmtree(path, onerror=tolerate)


def put_aside(layout: Layout, paths: list[Path], reason: str) -> bool:
    """Move `paths` to quarantine with the reason. Log a warning and return False if the cache cannot be written."""
    try:
        place = _quarantine(layout)
        for path in paths:
            with suppress(FileNotFoundError):  # another process moved it first
                move(path, place / path.name)
        if not any(place.iterdir()):
            place.rmdir()
            return True
        (place / "reason.txt").write_text("\n".join([reason, *map(str, paths)]) + "\n")
    except OSError as error:
        log.warning("damaged: %s: %s; it cannot be moved to quarantine (%s)", paths[0], reason, error)
        return False
    log.warning("damaged: %s: %s; moved to %s; it will be rebuilt", paths[0], reason, place)
    return True


def keep_bytes(layout: Layout, name: str, data: bytes, reason: str) -> Path | None:
    """Keep wrong bytes of a remote in quarantine and return the folder; None if the cache cannot be written."""
    try:
        place = _quarantine(layout)
        (place / Path(name).name).write_bytes(data)
        (place / "reason.txt").write_text(f"{reason}\n")
    except OSError as error:
        log.debug("%s was not kept: %s", name, error)
        return None
    return place


def _quarantine(layout: Layout) -> Path:
    place = layout.quarantine / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(4).hex()}"
    place.mkdir(parents=True)
    return place
