"""List and remove stored engines, for `sdflow cache engines` (`sdflow.runtime.sessions.engine_cache`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.errors import os_errors_as
from sdflow.runtime.sessions.engine_cache import MACHINE_FILE, MODEL_FILE


@dataclass(frozen=True)
class KeptEngines:
    """Engines of one provider on one device with one set of versions. models: number of graphs with weights, per set of
    shapes.
    bytes: of all files, with timings. used: when the last file was written, in seconds since the epoch."""

    folder: Path
    provider: str
    device: str
    driver: str
    models: int
    bytes: int
    used: float


def kept_engines(root: Path) -> list[KeptEngines]:
    """Return all engines in a folder, last used first. Foreign folders are ignored."""
    found = [_read(each) for each in root.iterdir()] if root.is_dir() else []
    return sorted((each for each in found if each is not None), key=lambda each: -each.used)


def clear_engines(kept: Iterable[KeptEngines]) -> None:
    """Remove engines; providers rebuild them when needed. Raises UsageError for folders that cannot be removed."""
    for each in kept:
        remedy = "Stop the programs that use it, or fix the permissions."
        with os_errors_as("cannot be removed", each.folder, remedy):
            shutil.rmtree(each.folder)


def _read(folder: Path) -> KeptEngines | None:
    try:
        machine: Any = json.loads((folder / MACHINE_FILE).read_bytes())
        stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
        models = sum((each / MODEL_FILE).is_file() for each in folder.iterdir())
    except (OSError, ValueError):
        return None
    if not isinstance(machine, dict) or "provider" not in machine:
        return None
    # For plugin devices, Windows reports a description and ONNX Runtime a vendor; versions are those of all drivers.
    device = str(machine.get("device") or machine.get("Description") or machine.get("vendor") or "")
    drivers = machine.get("driver") or machine.get("drivers") or ""
    driver = ", ".join(map(str, drivers)) if isinstance(drivers, list) else str(drivers)
    size, used = sum(each.st_size for each in stats), max(each.st_mtime for each in stats)
    return KeptEngines(folder, str(machine["provider"]), device, driver, models, size, used)
