"""Files that are kept for a user with a record of what they were made of: a damaged or foreign one is not taken."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sdflow.digest import canonical_json
from sdflow.disk.atomic_write import write_whole


def read_kept(path: Path, key: str) -> bytes | None:
    """What `keep` has kept there under this key; None where that is not there, or not as it was."""
    try:
        content, record = path.read_bytes(), _record_of(path).read_bytes()
    except OSError:
        return None
    return content if record == _record(content, key) else None


def keep(path: Path, content: bytes, key: str) -> None:
    """Raises OSError."""
    write_whole(path, content, durable=True)
    write_whole(_record_of(path), _record(content, key), durable=True)


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _record(content: bytes, key: str) -> bytes:
    return canonical_json({"key": key, "sha256": hashlib.sha256(content).hexdigest()})
