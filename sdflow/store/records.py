"""JSON files of the cache that carry their own digest, so a truncated or altered one is detected."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.artifact import Action
from sdflow.digest import canonical_json, digest_json
from sdflow.disk.input_file import read_input

LARGEST = 64 << 20  # bytes; a manifest of hundreds of thousands of files is smaller
# Errors of opening a directory, a pipe or a device, an oversized file, a link loop, and a socket.
_NO_RECORD = (errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENXIO)


class BadRecord(Exception):
    """The file is not a record: truncated, altered, or in another format."""


@dataclass(frozen=True)
class Stored:
    """Content of an action file: the action produced the object."""

    action: Action
    object: str
    facts: Mapping[str, Any]
    built: Mapping[str, Any]
    published: float  # Unix time


def dump(body: Mapping[str, Any]) -> bytes:
    """Serialize a record. Raises TypeError or ValueError for values that JSON cannot hold."""
    return canonical_json({"record": body, "sha256": digest_json(body)})


def dump_action(stored: Stored) -> bytes:
    return dump({"format": 1, **vars(stored), "action": stored.action.content})


def read_record(path: Path) -> bytes:
    """Read the bytes of a record. Raises OSError, or BadRecord for anything but a regular file: a pipe never ends."""
    try:
        return read_input(path, LARGEST)
    except OSError as error:
        if error.errno in _NO_RECORD:
            raise BadRecord(f"it is not a record ({error.strerror})") from error
        raise


def load(data: bytes) -> dict[str, Any]:
    """Parse a record and check its digest. Raises BadRecord."""
    try:
        outer = json.loads(data)
        body, claimed = outer["record"], outer["sha256"]
        actual = digest_json(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRecord(f"it cannot be read ({error})") from error
    if not isinstance(body, dict) or actual != claimed:
        raise BadRecord("it was modified after it was written")
    return body


def load_action(data: bytes) -> Stored:
    body = load(data)
    try:
        return Stored(Action(body["action"]), body["object"], body["facts"], body["built"], body["published"])
    except KeyError as error:
        raise BadRecord(f"it has no {error}") from error
