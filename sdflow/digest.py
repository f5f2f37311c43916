"""Canonical JSON and SHA-256 digests of values, files and trees of files.

A digest is always the full 64 hexadecimal digits of SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from sdflow import stop
from sdflow.disk.input_file import open_input

_BLOCK = 1 << 20

LONGEST_NAME, LONGEST_PATH = 255, 1024
"""Bytes of a file name and characters of a path: the longest that every supported system accepts."""


def canonical_json(value: Any) -> bytes:
    """Return the canonical UTF-8 encoding of `value`: sorted keys, no white space, no NaN or infinity.

    Raises ValueError for NaN and infinities, TypeError for values without a JSON form (paths, sets, bytes).
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content, read in blocks. Raises Stopped if the process is asked to end meanwhile."""
    digest, block = hashlib.sha256(), bytearray(_BLOCK)
    view = memoryview(block)
    with open_input(path) as stream:
        while count := stream.readinto(block):
            digest.update(view[:count])
            stop.check()
    return digest.hexdigest()


@dataclass(frozen=True, order=True)
class FileEntry:
    """A file of a tree: POSIX path relative to the root, size in bytes, SHA-256 of the content."""

    path: str
    size: int
    sha256: str


def inside(path: str) -> bool:
    """Whether a POSIX path stays inside its tree on every system, and is short enough for each."""
    posix, windows = PurePosixPath(path), PureWindowsPath(path)
    plain = bool(path) and "\0" not in path and "\\" not in path and str(posix) == path
    short = (
        all(len(part.encode(errors="replace")) <= LONGEST_NAME for part in posix.parts) and len(path) <= LONGEST_PATH
    )
    return plain and short and not posix.is_absolute() and not windows.drive and ".." not in posix.parts and path != "."


def digest_tree(entries: Iterable[FileEntry]) -> str:
    """SHA-256 of the sorted (path, size, sha256) list: equal trees have equal digests, wherever they are stored."""
    return digest_json([[entry.path, entry.size, entry.sha256] for entry in sorted(entries)])
