"""Caches digests of files by their stat, so that unchanged gigabytes are not hashed on every run.

An entry is valid while size, mtime, inode and ctime are unchanged (not ctime on Windows, which is the creation time).
ctime cannot be set back, so a change with a restored mtime is detected.

Two changes within one clock tick share a stat, and a write through a memory map keeps the old stat until the kernel
updates it. As in git, an entry is stored only if the file was untouched for `SETTLED_NS` before reading began. Writes
through a map on a file system that never updates the stat (tmpfs) still go unnoticed: use `rehash`. Objects of the
cache skip the wait: they are read-only before they are hashed, and hashed again before use.
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

COARSEST_NS = 2_000_000_000  # FAT has the coarsest clock of the common file systems


def _settled_ns() -> int:
    """Longest delay of the mtime of a file written through a memory map, plus one tick. Only the first write to a clean
    page updates the time, and a page may stay dirty for this long."""
    hundredths = 3000 + 500  # Linux's defaults
    try:
        names = ("dirty_expire_centisecs", "dirty_writeback_centisecs")
        hundredths = sum(int(Path("/proc/sys/vm", name).read_text()) for name in names)
    except (OSError, ValueError):
        log.debug("the kernel does not say for how long pages stay dirty")
    return hundredths * 10_000_000 + COARSEST_NS


SETTLED_NS = _settled_ns()  # how long a file must be untouched for its stat to be trusted later
SCHEMA = 1
SHA256 = "sha256"
_HEX = re.compile(r"[0-9a-f]{64}")
_TABLE = (
    "CREATE TABLE stat (path TEXT, what TEXT, identity TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (path, what))"
    " WITHOUT ROWID"
)


class Known(NamedTuple):
    """A value computed from a file, and the stat identity it holds for."""

    path: Path
    what: str
    identity: str
    value: str


def identity(stat: os.stat_result) -> str:
    """Return the fields of a stat that must be equal for the content to count as unchanged."""
    return ":".join(map(str, file_stamp.identity(stat)))


def stamp_identity(stamp: file_stamp.Stamp) -> str:
    return ":".join(str(stamp[key]) for key in ("size", "mtime_ns", "inode", "ctime_ns"))


class StatCache:
    """Values of files in `stat.sqlite`. Without a usable database, files are read again. rehash: ignore stored ones."""

    def __init__(self, layout: Layout, *, rehash: bool = False) -> None:
        self._layout, self._rehash = layout, rehash
        self._root = Path(os.path.abspath(layout.root))  # noqa: PTH100  (resolve() would ask the disk)
        self._memory: dict[tuple[str, str], tuple[str, str]] = {}
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._guard = threading.RLock()

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a file. Raises OSError if it cannot be read, CacheError if it keeps changing."""
        return self.value(path, SHA256, digest_file)

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        """Return `compute(path)`, cached by the file's stat. what: name and version of the computation. Raises whatever
        `compute` raises, OSError for a missing file, CacheError if the file keeps changing."""
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
            "the file changed while it was read", where=str(path), remedy="Wait until it is complete and run again."
        )

    def recall(self, path: Path, what: str, now: str) -> str | None:
        """Return the known value of a file whose identity is `now`, else None."""
        key = self._key(path), what
        entry = self._memory.get(key)
        if entry is None and not self._rehash:
            statement = "SELECT identity, value FROM stat WHERE path = ? AND what = ?"
            for was, value in self._execute(statement, [key], write=False):
                if what != SHA256 or _HEX.fullmatch(str(value)):
                    entry = self._memory[key] = str(was), str(value)
        return entry[1] if entry is not None and entry[0] == now else None

    def remember(self, values: Iterable[Known]) -> None:
        """Store values for this process and, if the cache is writable, for later ones."""
        rows = [(self._key(known.path), known.what, known.identity, known.value) for known in values]
        self._memory.update({(row[0], row[1]): (row[2], row[3]) for row in rows})
        statement = "INSERT OR REPLACE INTO stat (path, what, identity, value) VALUES (?, ?, ?, ?)"
        self._execute(statement, rows, write=True)

    def prune(self) -> None:
        paths = self._execute("SELECT DISTINCT path FROM stat", [()], write=False)
        gone = [(str(path),) for (path,) in paths if not (self._layout.root / str(path)).exists()]
        self._execute("DELETE FROM stat WHERE path = ?", gone, write=True)
        self._memory.clear()

    def close(self) -> None:
        with self._guard:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _key(self, path: Path) -> str:
        """Return a path relative to the cache if inside it, so that the cache can move, else the absolute path."""
        absolute = Path(os.path.abspath(path))  # noqa: PTH100
        return absolute.relative_to(self._root).as_posix() if absolute.is_relative_to(self._root) else str(absolute)

    def _execute(self, statement: str, rows: Sequence[Sequence[str]], *, write: bool, again: bool = True) -> list[Any]:
        """Run a statement for each row of parameters in one transaction. Returns [] without a usable database."""
        with self._guard:
            try:
                if not rows or (connection := self._open(create=write)) is None:
                    return []
                with connection:
                    if write:
                        connection.execute("BEGIN IMMEDIATE")
                    return [found for row in rows for found in connection.execute(statement, row)]
            except sqlite3.DatabaseError as error:
                if self._cope(error) and again:  # retry once, on a new database
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
                    if is_old():  # no other process created it while we waited
                        for statement in ("DROP TABLE IF EXISTS stat", _TABLE, f"PRAGMA user_version = {SCHEMA}"):
                            connection.execute(statement)
        except sqlite3.DatabaseError:
            connection.close()
            raise
        self._connection, self._process = connection, os.getpid()
        return connection

    def _cope(self, error: sqlite3.DatabaseError) -> bool:
        """Discard a corrupt database and return True: try again. Return False for a locked, full or read-only one."""
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
            log.debug("the corrupt stat cache was not removed: %s", reason)
            return False
        return True

    def _is_broken(self) -> bool:
        """Check again under the lock: another process may have replaced the corrupt database."""
        try:
            connection = sqlite3.connect(self._layout.stat, timeout=5)
            try:
                return bool(connection.execute("PRAGMA quick_check").fetchone() != ("ok",))
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            return not isinstance(error, sqlite3.OperationalError)
