"""API keys for users and administrators. Key files are reread when they change."""

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
    """Return the keys in a file, one per line; lines starting with # are comments. Raises UsageError."""
    try:
        lines = read_input(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy="Write one key per line.") from error
    keys = tuple(line for line in map(str.strip, lines) if line and not line.startswith("#"))
    if not keys:
        raise UsageError("contains no key", where=str(path), remedy="Write one key per line.")
    return keys


@dataclass
class Keys:
    """A set of API keys. path: the file they come from. If it becomes unreadable, the last keys stay valid."""

    known: tuple[str, ...]
    path: Path | None = None
    _stamp: tuple[int, int] | None = None

    def match(self, given: bytes) -> str | None:
        """Return an identifier that does not reveal the key, or None if the key is unknown."""
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
    """The sender of a request. owner: identifier of the key; None may stop any request. administers: whether the caller
    may add and remove LoRAs and pipelines."""

    owner: str | None = None
    administers: bool = True

    def may_stop(self, owner: str | None) -> bool:
        return self.owner is None or self.owner == owner


@dataclass(frozen=True)
class Access:
    """Access control. Without keys, anyone may generate; without admin_keys, anyone who may generate may administer.
    origins: allowed CORS origins. hosts: accepted Host headers; None: any."""

    keys: Keys | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK
    admin_keys: Keys | None = None

    def caller(self, authorization: bytes) -> Caller | None:
        """Return the caller with this Authorization header, or None if it is not authorized."""
        kind, _, given = authorization.partition(b" ")
        if kind.lower() == b"basic":  # sent by clients of A1111's webui
            try:
                given = base64.b64decode(given).partition(b":")[2]
            except ValueError:
                given = b""
        elif kind.lower() != b"bearer":  # gateways rate-limit by this header, so a key must have few spellings
            given = b""
        given = given.strip()
        if self.admin_keys is not None and self.admin_keys.match(given) is not None:
            return Caller()
        if self.keys is None:
            return Caller(None if self.admin_keys is None else "", self.admin_keys is None)
        owner = self.keys.match(given)
        return None if owner is None else Caller(owner, self.admin_keys is None)
