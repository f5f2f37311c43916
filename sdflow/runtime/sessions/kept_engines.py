"""What `sdflow cache engines` lists and removes: the engines that providers have kept
(`sdflow.runtime.sessions.engine_cache`)."""

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
    """Of one provider on one device with one set of versions. models: graphs with their weights, each size apart.
    bytes: of all files, with the timings. used: when the last file was written, in seconds of the epoch."""

    folder: Path
    provider: str
    device: str
    driver: str
    models: int
    bytes: int
    used: float


def kept_engines(root: Path) -> list[KeptEngines]:
    """All that are kept in a folder, the last used first. What is none of ours is passed over."""
    found = [_read(each) for each in root.iterdir()] if root.is_dir() else []
    return sorted((each for each in found if each is not None), key=lambda each: -each.used)


def clear_engines(kept: Iterable[KeptEngines]) -> None:
    """Remove them. A provider builds them again when they are needed. Raises UsageError for what cannot be removed."""
    for each in kept:
        remedy = "End the programs that draw with it, or fix the permissions."
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
    # Of plugins' devices, Windows tells a description and ONNX Runtime a vendor; the versions are those of all drivers.
    device = str(machine.get("device") or machine.get("Description") or machine.get("vendor") or "")
    drivers = machine.get("driver") or machine.get("drivers") or ""
    driver = ", ".join(map(str, drivers)) if isinstance(drivers, list) else str(drivers)
    size, used = sum(each.st_size for each in stats), max(each.st_mtime for each in stats)
    return KeptEngines(folder, str(machine["provider"]), device, driver, models, size, used)
