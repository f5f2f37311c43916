"""JSON files of the cache that carry their own digest, so that a truncated or altered one is never believed."""

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

LARGEST = 64 << 20
"""Bytes of a record at most: manifests of hundreds of thousands of files have fewer."""
_NO_RECORD = (errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENXIO)
"""What opening a directory, a pipe or a device, a giant, links in a circle, and a socket gives."""


class BadRecord(Exception):
    """A file is not a record: truncated, altered, or of another format."""


@dataclass(frozen=True)
class Stored:
    """What an action file says: this action gave that object, at `published` (seconds since 1970)."""

    action: Action
    object: str
    facts: Mapping[str, Any]
    built: Mapping[str, Any]
    published: float


def dump(body: Mapping[str, Any]) -> bytes:
    """The file content for `body`. Raises TypeError or ValueError for what JSON cannot hold."""
    return canonical_json({"record": body, "sha256": digest_json(body)})


def dump_action(stored: Stored) -> bytes:
    return dump({"format": 1, **vars(stored), "action": stored.action.content})


def read_record(path: Path) -> bytes:
    """The bytes of a record's file. Raises OSError, and BadRecord for what is no file, such as a pipe, which would never end."""
    try:
        return read_input(path, LARGEST)
    except OSError as error:
        if error.errno in _NO_RECORD:
            raise BadRecord(f"it is no record ({error.strerror})") from error
        raise


def load(data: bytes) -> dict[str, Any]:
    """The body of a record. Raises BadRecord."""
    try:
        outer = json.loads(data)
        body, claimed = outer["record"], outer["sha256"]
        actual = digest_json(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRecord(f"it cannot be read ({error})") from error
    if not isinstance(body, dict) or actual != claimed:
        raise BadRecord("it was altered after it was written")
    return body


def load_action(data: bytes) -> Stored:
    """Raises BadRecord."""
    body = load(data)
    try:
        return Stored(Action(body["action"]), body["object"], body["facts"], body["built"], body["published"])
    except KeyError as error:
        raise BadRecord(f"it lacks {error}") from error
