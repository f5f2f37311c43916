"""Digests of files that did not change since they were last read, by their stat: no rehash of gigabytes per run.

An entry is believed when size, mtime, inode and (except on Windows, where it means something else) ctime are the same
as when the content was read. ctime cannot be set back, so a change with restored mtime is seen as well.

A file that changes twice within one tick of the clock keeps its stat, and one that is written through a memory map keeps
it until the kernel next looks. As git does, an entry is therefore only kept if the file had been left alone for
`SETTLED_NS` when reading began: a later write then shows, but for one through a map of a file system that never looks
(tmpfs); `rehash` is for those. Objects of the cache are the exception: they are made read-only before they are hashed,
and are hashed again before use.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sdflow.digest import digest_file
from sdflow.disk import file_stamp
from sdflow.errors import CacheError
from sdflow.store.layout import Layout, discard, log
from sdflow.store.locks import held

COARSEST_NS = 2_000_000_000
"""The coarsest clock of a common file system, FAT."""


def _settled_ns() -> int:
    """For how long the kernel may put off the new time of a file that is written through a memory map, and a tick more: pages
    stay dirty for so long, and only the first write to a clean page renews the time."""
    hundredths = 3000 + 500  # Linux's defaults
    try:
        names = ("dirty_expire_centisecs", "dirty_writeback_centisecs")
        hundredths = sum(int(Path("/proc/sys/vm", name).read_text()) for name in names)
    except (OSError, ValueError):
        log.debug("the kernel does not say for how long pages stay dirty")
    return hundredths * 10_000_000 + COARSEST_NS


SETTLED_NS = _settled_ns()
"""For how long a file must have been left alone for its stat to be believed later."""
SCHEMA = 1
SHA256 = "sha256"
_HEX = re.compile(r"[0-9a-f]{64}")
_TABLE = (
    "CREATE TABLE stat (path TEXT, what TEXT, identity TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (path, what))"
    " WITHOUT ROWID"
)


class Known(NamedTuple):
    """A value of a file, and the stat at which it was true."""

    path: Path
    what: str
    identity: str
    value: str


def identity(stat: os.stat_result) -> str:
    """What of a file's stat must be the same for its content to count as the same."""
    return ":".join(map(str, file_stamp.identity(stat)))


def stamp_identity(stamp: file_stamp.Stamp) -> str:
    """`identity`, of the stat that a stamp was made of."""
    return ":".join(str(stamp[key]) for key in ("size", "mtime_ns", "inode", "ctime_ns"))


class StatCache:
    """Remembers values of files in `stat.sqlite`. Without a usable database everything works, by reading again.

    rehash: believe nothing that was noted before: every file is read once more.
    """

    def __init__(self, layout: Layout, *, rehash: bool = False) -> None:
        self._layout, self._rehash = layout, rehash
        self._root = Path(os.path.abspath(layout.root))  # noqa: PTH100  (resolve() would ask the disk)
        self._memory: dict[tuple[str, str], tuple[str, str]] = {}
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._guard = threading.RLock()

    def digest(self, path: Path) -> str:
        """SHA-256 of a file's content. Raises OSError if it cannot be read, CacheError if it keeps changing."""
        return self.value(path, SHA256, digest_file)

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        """`compute(path)`, or what it gave when the file had this stat. `what` names the computation and its version. Raises what
        `compute` raises, OSError for a missing file, CacheError for one that changes while it is read."""
        for _ in range(3):
            began = time.time_ns()
            before = path.stat()
            now = identity(before)
            known = self.recall(path, what, now)
            if known is not None:
                return known
            value = compute(path)
            if identity(path.stat()) == now:
                if file_stamp.changed_ns(before) < began - SETTLED_NS:
                    self.remember([Known(path, what, now, value)])
                return value
        raise CacheError(
            "the file changes while it is read", where=str(path), remedy="Wait until it is complete and run again."
        )

    def recall(self, path: Path, what: str, now: str) -> str | None:
        """The value of a file whose identity is `now`, if it is known."""
        key = self._key(path), what
        entry = self._memory.get(key)
        if entry is None and not self._rehash:
            statement = "SELECT identity, value FROM stat WHERE path = ? AND what = ?"
            for was, value in self._execute(statement, [key], write=False):
                if what != SHA256 or _HEX.fullmatch(str(value)):
                    entry = self._memory[key] = str(was), str(value)
        return entry[1] if entry is not None and entry[0] == now else None

    def remember(self, values: Iterable[Known]) -> None:
        """Keep values, in this process and, where the cache can be written, for later ones."""
        rows = [(self._key(known.path), known.what, known.identity, known.value) for known in values]
        self._memory.update({(row[0], row[1]): (row[2], row[3]) for row in rows})
        statement = "INSERT OR REPLACE INTO stat (path, what, identity, value) VALUES (?, ?, ?, ?)"
        self._execute(statement, rows, write=True)

    def prune(self) -> None:
        """Forget files that are no longer there."""
        paths = self._execute("SELECT DISTINCT path FROM stat", [()], write=False)
        gone = [(str(path),) for (path,) in paths if not (self._layout.root / str(path)).exists()]
        self._execute("DELETE FROM stat WHERE path = ?", gone, write=True)
        self._memory.clear()

    def close(self) -> None:
        """Close the database; it opens again when needed."""
        with self._guard:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _key(self, path: Path) -> str:
        """Files of the cache by their place in it, so that it can be moved or mounted elsewhere; others absolute."""
        absolute = Path(os.path.abspath(path))  # noqa: PTH100
        return absolute.relative_to(self._root).as_posix() if absolute.is_relative_to(self._root) else str(absolute)

    def _execute(self, statement: str, rows: Sequence[Sequence[str]], *, write: bool, again: bool = True) -> list[Any]:
        """What a statement gives for each row of parameters, in one transaction; nothing without a usable database."""
        with self._guard:
            try:
                if not rows or (connection := self._open(create=write)) is None:
                    return []
                with connection:
                    if write:
                        connection.execute("BEGIN IMMEDIATE")
                    return [found for row in rows for found in connection.execute(statement, row)]
            except sqlite3.DatabaseError as error:
                if self._cope(error) and again:  # once more, on a new database
                    return self._execute(statement, rows, write=write, again=False)
                return []

    def _open(self, *, create: bool) -> sqlite3.Connection | None:
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        if not self._layout.stat.exists():
            if not create:
                return None
            try:
                self._layout.ensure()
            except CacheError as error:
                log.debug("no stat cache: %s", error)
                return None
        uri = f"{self._layout.stat.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        connection = sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None, check_same_thread=False)

        def is_old() -> bool:
            return bool(connection.execute("PRAGMA user_version").fetchone()[0] != SCHEMA)

        try:
            if is_old():
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    if is_old():  # nobody else made it while we waited
                        for statement in ("DROP TABLE IF EXISTS stat", _TABLE, f"PRAGMA user_version = {SCHEMA}"):
                            connection.execute(statement)
        except sqlite3.DatabaseError:
            connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        return connection

    def _cope(self, error: sqlite3.DatabaseError) -> bool:
        """A corrupt database is put away (True: try again); a locked, full or read-only one is done without."""
        self.close()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            log.debug("stat cache not used: %s", error)
            return False
        log.warning("%s is corrupt (%s); starting a new one", self._layout.stat, error)
        try:
            self._layout.ensure()
            with held(self._layout.lock("stat")):
                if self._is_broken():
                    discard(self._layout, Path(f"{self._layout.stat}-journal"))
                    discard(self._layout, self._layout.stat)
        except (CacheError, OSError) as reason:
            log.debug("the corrupt stat cache stays: %s", reason)
            return False
        return True

    def _is_broken(self) -> bool:
        """Look again under the lock: another process may have put the corrupt one away already."""
        try:
            connection = sqlite3.connect(self._layout.stat, timeout=5)
            try:
                return bool(connection.execute("PRAGMA quick_check").fetchone() != ("ok",))
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            return not isinstance(error, sqlite3.OperationalError)
