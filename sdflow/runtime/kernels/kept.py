"""Per-user files stored with a record of their inputs and digest; damaged or foreign files are rejected."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sdflow.digest import canonical_json
from sdflow.disk.atomic_write import write_whole


def read_kept(path: Path, key: str) -> bytes | None:
    """Return the content stored by `keep` under this key, or None if it is missing or modified."""
    try:
        content, record = path.read_bytes(), _record_of(path).read_bytes()
    except OSError:
        return None
    return content if record == _record(content, key) else None


def keep(path: Path, content: bytes, key: str) -> None:
    """Store content with its record. Raises OSError."""
    write_whole(path, content, durable=True)
    write_whole(_record_of(path), _record(content, key), durable=True)


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _record(content: bytes, key: str) -> bytes:
    return canonical_json({"key": key, "sha256": hashlib.sha256(content).hexdigest()})
