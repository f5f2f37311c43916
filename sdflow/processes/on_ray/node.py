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

from sdflow.errors import SdflowError, UsageError
from sdflow.machine.packages import distribution_version
from sdflow.processes.worker_group import Layers, WorkerGroup

LOG_BYTES = 1 << 20
"""Of what a worker printed, so much of the end goes to the driver."""

_groups: list[WorkerGroup] = []


def run_step(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    imported: Layers,
    versions: Mapping[str, str],
    told: Any,
    step: str,
) -> dict[str, Any]:
    """Run `python -m module` on the request. told: the actor that takes what the worker announces, under this name.

    Returns {"result":, "seconds":, "peak_memory":, "log":} or {"error": as a worker tells it, "log":}.
    """
    if wrong := _unlike_the_driver(versions) or _unseen(request):
        return {"error": {**wrong, "kind": "PassError", "errno": None}, "log": ""}
    if not _groups:
        _groups.append(WorkerGroup(1))
    with tempfile.TemporaryDirectory(prefix="sdflow-log-") as folder:
        log = Path(folder) / "log.txt"
        try:
            done = _groups[0].run(
                module,
                request,
                log=log,
                on_phase=lambda phrase: told.put.remote(step, "phase", phrase),
                on_memory=lambda resident: told.put.remote(step, "memory", resident),
                environment=environment,
                imported=imported,
            )
        except SdflowError as error:
            return {"error": _as_told(error, None), "log": _end_of(log)}
        except OSError as error:
            return {"error": _as_told(error, error.errno), "log": _end_of(log)}
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


def _unlike_the_driver(versions: Mapping[str, str]) -> dict[str, str] | None:
    different = []
    for name, wanted in versions.items():
        try:
            found = distribution_version(name)
        except UsageError:
            found = "not installed"
        if found != wanted:
            different.append(f"{name} {wanted} is wanted, here: {found}")
    if not different:
        return None
    return {
        "what": f"the node {os.uname().nodename} has other packages: " + "; ".join(different),
        "where": "",
        "remedy": "Install on every node what the driver has: the versions are part of a result's key.",
    }


def _unseen(request: Mapping[str, Any]) -> dict[str, str] | None:
    out = Path(request["out"])
    if out.is_dir():
        return None
    return {
        "what": f"the node {os.uname().nodename} does not see it",
        "where": str(out),
        "remedy": "Put the cache, the checkpoints and the LoRAs on a folder that all nodes have under the same path (--cache).",
    }


def _as_told(error: Exception, number: int | None) -> dict[str, Any]:
    where, remedy = (error.where, error.remedy) if isinstance(error, SdflowError) else (None, None)
    what = error.what if isinstance(error, SdflowError) else str(error)
    return {"kind": type(error).__name__, "what": what, "where": where, "remedy": remedy, "errno": number}


def _end_of(log: Path) -> str:
    return log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""
