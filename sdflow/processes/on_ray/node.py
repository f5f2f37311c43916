"""What a node of the cluster does: one step, in a worker process as on the driver's machine, and what it tells meanwhile.

The functions are found by their names: sdflow is installed on every node, of the driver's version. A Ray worker process
that has run a step keeps its group, so that the next one starts from servers that have the packages imported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.errors import PassError, SdflowError
from sdflow.machine.packages import found_version
from sdflow.processes.worker_group import Layers, WorkerGroup
from sdflow.processes.workers import error_message

LOG_BYTES = 1 << 20
"""Of what a worker printed, so much of the end goes to the driver."""

_groups: list[WorkerGroup] = []


def run_step(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    imported: Layers,
    versions: Mapping[str, str],
    announcements: Any,
    step: str,
) -> dict[str, Any]:
    """Run `python -m module` on the request. announcements: the actor for what the worker announces, under the step's name.

    Returns {"result":, "seconds":, "peak_memory":, "log":} or {"error": as a worker tells it, "log":}.
    """
    if not _groups:
        _groups.append(WorkerGroup(1))
    with tempfile.TemporaryDirectory(prefix="sdflow-log-") as folder:
        log = Path(folder) / "log.txt"
        try:
            _require_versions(versions)
            _require_shared(Path(request["out"]))
            done = _groups[0].run(
                module,
                request,
                log=log,
                on_phase=lambda phrase: announcements.put.remote(step, "phase", phrase),
                on_memory=lambda resident: announcements.put.remote(step, "memory", resident),
                environment=environment,
                imported=imported,
            )
        except (SdflowError, OSError) as error:
            return {"error": error_message(error), "log": _end_of(log)}
        return {"result": done.value, "seconds": done.seconds, "peak_memory": done.peak_memory, "log": _end_of(log)}


class Announcements:
    """Keeps what steps announce until the driver asks. Runs as an actor beside the driver."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[str, Any]]] = {}

    def put(self, step: str, kind: str, value: Any) -> None:
        """A phase is kept with those before it; of memory, the last value counts."""
        waiting = self._waiting.setdefault(step, [])
        if kind == "memory" and waiting and waiting[-1][0] == "memory":
            waiting.pop()
        waiting.append((kind, value))

    def take(self, step: str) -> list[tuple[str, Any]]:
        """What came since it was asked last."""
        return self._waiting.pop(step, [])


def _require_versions(versions: Mapping[str, str]) -> None:
    """Raises PassError where this node has other packages than the driver."""
    different = []
    for name, wanted in versions.items():
        found = found_version(name) or "not installed"
        if found != wanted:
            different.append(f"{name} {wanted} is wanted, here: {found}")
    if different:
        raise PassError(
            f"the node {os.uname().nodename} has other packages: " + "; ".join(different),
            remedy="Install on every node what the driver has: the versions are part of a result's key.",
        )


def _require_shared(out: Path) -> None:
    """Raises PassError where this node does not see the folder that the driver made."""
    if not out.is_dir():
        raise PassError(
            f"the node {os.uname().nodename} does not see it",
            where=str(out),
            remedy="Put the cache, the checkpoints and the LoRAs on a folder that all nodes have under the same path (--cache).",
        )


def _end_of(log: Path) -> str:
    return log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""
