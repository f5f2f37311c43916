"""API keys: of those who generate, and of those who administer. Files of them are read again when they change."""

from __future__ import annotations

import base64
import hashlib
import hmac
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sdflow.disk.input_file import read_input
from sdflow.errors import UsageError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one on each line; lines that begin with # are comments. Raises UsageError."""
    try:
        lines = read_input(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="Write a key on each line.") from error
    keys = tuple(line for line in map(str.strip, lines) if line and not line.startswith("#"))
    if not keys:
        raise UsageError("there is no key in it", where=str(path), remedy="Write one on each line.")
    return keys


@dataclass
class Keys:
    """known: the keys. path: of the file that they are from. A file that cannot be read any more leaves the last ones valid."""

    known: tuple[str, ...]
    path: Path | None = None
    _stamp: tuple[int, int] | None = None

    def match(self, given: bytes) -> str | None:
        """A name for the key that was given, from which the key does not follow; None: it is none of these."""
        with suppress(OSError, UsageError):
            if self.path is not None:
                stat = self.path.stat()
                stamp = stat.st_mtime_ns, stat.st_size
                if stamp != self._stamp:
                    self.known, self._stamp = read_keys(self.path), stamp
        found = [key.encode() for key in self.known if hmac.compare_digest(given, key.encode())]
        return hashlib.sha256(found[0]).hexdigest()[:8] if found else None


@dataclass(frozen=True)
class Caller:
    """Whose request it is. owner: a name of their key; None: nobody is told apart, and all requests may be stopped. administers:
    whether LoRAs and pipelines may be added and removed."""

    owner: str | None = None
    administers: bool = True

    def may_stop(self, owner: str | None) -> bool:
        """Whether this caller may stop a request of this owner."""
        return self.owner is None or self.owner == owner


@dataclass(frozen=True)
class Access:
    """Who may ask. keys, admin_keys: of those who generate, and of those who administer; None: anyone may generate, and whoever
    may generate may administer. origins: of pages of other servers that may. hosts: names of this server that a browser may know
    it by; None: any."""

    keys: Keys | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK
    admin_keys: Keys | None = None

    def caller(self, authorization: bytes) -> Caller | None:
        """Who sends this header; None: nobody who may generate."""
        kind, _, given = authorization.partition(b" ")
        if kind.lower() == b"basic":  # as clients of A1111's webui send it
            try:
                given = base64.b64decode(given).partition(b":")[2]
            except ValueError:
                given = b""
        elif kind.lower() != b"bearer":  # a gateway counts requests by this header: few spellings of one key
            given = b""
        given = given.strip()
        if self.admin_keys is not None and self.admin_keys.match(given) is not None:
            return Caller()
        if self.keys is None:
            return Caller(None if self.admin_keys is None else "", self.admin_keys is None)
        owner = self.keys.match(given)
        return None if owner is None else Caller(owner, self.admin_keys is None)
