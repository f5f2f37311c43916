"""Small builds: an action, the files that it gives, and how the executor builds one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdflow.artifact import Action, Record
from sdflow.store import Cache


def make_action(name: str = "a", **config: Any) -> Action:
    return Action(
        {
            "format": 1,
            "pass": {"name": "OnnxConversion", "version": 1},
            "config": {"name": name, **config},
            "submodel": "unet",
            "inputs": {"model": hashlib.sha256(name.encode()).hexdigest(), "loras": []},
            "uses": {"onnx": "1.22.0"},
            "user_scripts": {},
            "salt": "",
        }
    )


def contents(action: Action, size: int = 20_000) -> dict[str, bytes]:
    """What the action's pass writes: the same for the same action."""
    block = hashlib.sha256(action.digest.encode()).digest()
    return {
        "model.onnx": block * 8,
        "model.onnx.data": block * (size // len(block)),
        "config.json": action.digest.encode(),
        "extra/notes.txt": b"same for all",
    }


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def publish(cache: Cache, action: Action, files: dict[str, bytes] | None = None) -> Record:
    with cache.staging(action) as staging:
        write_files(staging.files, contents(action) if files is None else files)
        return staging.publish({"nodes": 3}, {"seconds": 0.5})


def build(
    cache: Cache, action: Action, *, locked: bool = True, built: Callable[[], None] = lambda: None, seconds: float = 0
) -> Record:
    """As the executor does it: look up, lock, look up again, build. `built` is called for a real build."""

    def unlocked() -> Record:
        record = cache.lookup(action)
        if record is None:
            time.sleep(seconds)
            built()
            record = publish(cache, action)
        return record

    record = cache.lookup(action)
    if record is not None:
        return record
    if not locked:
        return unlocked()
    with cache.lock(action):
        return unlocked()


def assert_complete(record: Record, files: dict[str, bytes]) -> None:
    found = {
        path.relative_to(record.artifact.path).as_posix(): path.read_bytes()
        for path in record.artifact.path.rglob("*")
        if path.is_file()
    }
    assert found == files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def overwrite(path: Path, data: bytes) -> None:
    """Other content for a file of an entry, which is read-only."""
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)
