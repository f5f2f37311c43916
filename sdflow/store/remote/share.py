"""File operations on a remote through fsspec, and the meaning of failures.

All stores map to two errors: the file is missing (`Absent`) or the remote cannot be used (`Unusable`). Messages of
libraries are stripped of credentials.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sdflow.machine.packages import how_to_install, missing
from sdflow.store.remote.reading import HTTP, S3, Misled, TooLong, listing, open_archive, open_limits, read
from sdflow.store.remote.spec import RemoteSpec, is_url, packages_of, without_secrets

T = TypeVar("T")
R = TypeVar("R")

LINES = 12  # threads
LOOK = 0.1  # seconds between calls of `meanwhile`
FOLDER = "sdflow-v1"
LISTING = 20  # timeouts that a listing may take: a long one has many pages
UNFINISHED = ".part"  # suffix of files being written, or left by writers that died
_IN_PLACE = ("file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "arrow_hdfs", "webhdfs", "memory")
"""Stores that show partially written files: files are written under another name there and renamed."""
_URLS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>)]+")
_SECRETS = re.compile(r"(?i)((?:key|token|secret|signature|password|credential|sig)[\w-]*\s*[=:]\s*)[^\s,;&)'\"]+")


class Absent(Exception):
    """The remote does not have the file."""


class Refused(Absent):
    """The store denies access to a file, as it also does for missing files."""


class Unusable(Exception):
    """The remote does not answer, refuses, or fails. The message has no credentials. final: a retry would fail too."""

    def __init__(self, what: str, *, final: bool = False) -> None:
        super().__init__(what)
        self.final = final


@dataclass(frozen=True)
class Found:
    path: str  # under the prefix
    size: int
    changed: float | None  # Unix time by the store's clock


class Share:
    """A remote's files. Connects on first use. Thread-safe."""

    def __init__(self, spec: RemoteSpec) -> None:
        self.spec = spec
        self._files: Any = None
        self._root = ""
        self._opening = threading.Lock()

    def read(self, path: str, limit: int) -> bytes:
        """Return the content of a file of at most `limit` bytes. Raises Absent, Unusable, TooLong."""
        return self._looked(path, lambda files, whole: read(files, self._protocol, whole, limit, self.spec.timeout))

    def stat(self, path: str) -> Found | None:
        """Return a file's metadata, or None if missing. Raises Unusable."""

        def look(files: Any, whole: str) -> Found:
            files.invalidate_cache()
            return _found(path, files.info(whole))

        with suppress(Absent):
            return self._looked(path, look)
        return None

    def _looked(self, path: str, look: Callable[[Any, str], T]) -> T:
        """Call `look` with the store and the full path. Raises Absent, Unusable."""
        files = self._open()
        try:
            with _usable():
                return look(files, f"{self._root}/{path}")
        except FileNotFoundError as error:
            raise Absent(path) from error
        except Unusable as error:
            if self._may_be_absent(error.__cause__):
                raise Refused(path) from error
            raise

    def write(self, path: str, data: bytes) -> None:
        """Write a file atomically. Raises Unusable."""
        files, target = self._open(), f"{self._root}/{path}"
        if self.spec.archive:
            raise Unusable("an archive is written as a whole: `sdflow cache push --url`, or `export`", final=True)
        with _usable(also=FileNotFoundError):
            if self._protocol not in _IN_PLACE:
                files.pipe_file(target, data)
                return
            aside = f"{target}.{os.urandom(6).hex()}{UNFINISHED}"
            files.makedirs(target.rpartition("/")[0], exist_ok=True)
            files.pipe_file(aside, data)
            files.mv(aside, target)

    def list(self, folder: str) -> Iterator[Found]:
        """Yield every file under a folder. Stores may omit recent writes. Raises Unusable."""
        files, root = self._open(), f"{self._root}/{folder}"
        if self._protocol in HTTP:
            raise Unusable("HTTP does not support listing", final=True)
        try:
            with _usable():
                files.invalidate_cache()
                found = listing(files, self._protocol, root, LISTING * self.spec.timeout)
        except FileNotFoundError:
            return
        begins = len(files._strip_protocol(self._root)) + 1
        for path, info in sorted(found.items()):
            yield _found(path[begins:], info)

    def remove(self, path: str) -> None:
        """Remove a file if it exists. Raises Unusable."""
        files = self._open()
        with suppress(FileNotFoundError), _usable():
            files.rm_file(f"{self._root}/{path}")

    def _may_be_absent(self, error: BaseException | None) -> bool:
        """Return whether the file may be missing: S3 then answers 403 to clients that may not list the bucket. Invalid
        credentials have other codes."""
        if not isinstance(error, PermissionError) or self._protocol not in S3:
            return False
        said: Any = getattr(error.__cause__, "response", None)
        return not isinstance(said, dict) or said.get("Error", {}).get("Code") in ("AccessDenied", "403")

    @property
    def _protocol(self) -> str:
        protocol = self._files.protocol
        return str(protocol if isinstance(protocol, str) else protocol[0])

    def _open(self) -> Any:
        with self._opening, _usable(also=FileNotFoundError):
            if self._files is None:
                self._files, self._root = _opened(self.spec)
            return self._files


@dataclass(frozen=True)
class Lines:
    """Runs work in several threads and gives up when none makes progress. They are daemons: one that hangs in a library
    does not keep the process alive. meanwhile: called repeatedly while waiting; its exceptions end the work."""

    share: Share
    meanwhile: Callable[[], None] = lambda: None

    def for_each(
        self,
        items: Iterable[T],
        do: Callable[[T], R],
        done: Callable[[R], None] = lambda result: None,
        timeout: float | None = None,
    ) -> None:
        """Call `do` with each item in several threads, and `done` with each result in the calling thread. Raises what
        they and `meanwhile` raise, and Unusable after `timeout` seconds (default: the remote's) without a result."""
        patience = self.share.spec.timeout if timeout is None else timeout
        left: SimpleQueue[T] = SimpleQueue()
        results: SimpleQueue[tuple[bool, R | BaseException]] = SimpleQueue()
        ended = threading.Event()
        count = 0
        for item in items:
            left.put(item)
            count += 1

        def work() -> None:
            while not ended.is_set():
                try:
                    item = left.get_nowait()
                except Empty:
                    return
                try:
                    results.put((True, do(item)))
                except BaseException as error:  # noqa: BLE001  (re-raised in the calling thread)
                    results.put((False, error))

        for _ in range(min(LINES, count)):
            threading.Thread(target=work, name="remote cache", daemon=True).start()
        moved = time.monotonic()
        try:
            while count:
                self.meanwhile()
                try:
                    well, result = results.get(timeout=LOOK)
                except Empty:
                    if time.monotonic() - moved > patience:
                        raise Unusable(f"no answer for {patience:g} seconds") from None
                    continue
                moved = time.monotonic()
                count -= 1
                if not well:
                    assert isinstance(result, BaseException)
                    raise result
                done(result)  # type: ignore[arg-type]
        finally:
            ended.set()

    def found(self, items: Iterable[T], look: Callable[[T], R | None]) -> list[R]:
        """Return the results of `for_each` other than None, in completion order."""
        results: list[R | None] = []
        self.for_each(items, look, results.append)
        return [result for result in results if result is not None]

    def one(self, do: Callable[[], R], timeout: float | None = None) -> R:
        """Return the result of one call, run as in `for_each`."""
        results: list[R] = []
        self.for_each([None], lambda _: do(), results.append, timeout)
        return results[0]

    def listed(self, folder: str) -> list[Found]:
        return self.one(lambda: list(self.share.list(folder)), LISTING * self.share.spec.timeout)


def _opened(spec: RemoteSpec) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        if spec.archive:
            return open_archive(spec.archive), FOLDER
        url = spec.url if is_url(spec.url) else f"file://{spec.url}"
        scheme = url.partition("://")[0].lower()
        if "::" in scheme:
            raise Misled("chained URLs (such as simplecache::) have no limits; use the store's own URL")
        files, root = url_to_fs(url, **open_limits(scheme, spec.timeout))
    except ImportError as error:
        wanted = packages_of(spec.url)
        raise Misled(f"{error}; {how_to_install(*(missing(*wanted) or wanted))}") from error
    return files, f"{root.rstrip('/')}/{FOLDER}"


@contextmanager
def _usable(also: type[Exception] | None = None) -> Iterator[None]:
    """Turn exceptions of the body into Unusable, except TooLong and FileNotFoundError unless in `also`. Only here
    everything is caught: each store's library (botocore, aiohttp, azure, google, paramiko) has its own errors, which
    cannot be named without importing it, and none may fail a build."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError | TooLong) and not (also and isinstance(error, also)):
            raise
        raise _unusable(error) from error


def _unusable(error: Exception) -> Unusable:
    if isinstance(error, TimeoutError):
        return Unusable("no answer in time")
    if isinstance(error, Misled):
        return Unusable(str(error), final=True)
    text = " ".join(str(error).split()) or "no reason given"
    text = _SECRETS.sub(r"\1…", _URLS.sub(lambda match: without_secrets(match[0]), text))
    status = getattr(error, "status", None)
    final = isinstance(error, PermissionError | NotImplementedError) or status in (401, 403, 405)
    return Unusable(f"{type(error).__name__}: {text[:200]}", final=final)


def _found(path: str, info: dict[str, Any]) -> Found:
    size = int(info.get("size") or 0)
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value: Any = info.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = value.timestamp()
        if isinstance(value, int | float):
            return Found(path, size, float(value))
    return Found(path, size, None)
