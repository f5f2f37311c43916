"""A worker group on the nodes of a Ray cluster.

The driver plans, looks up the cache, holds locks and publishes, as without Ray; each pass runs in a Ray task that
requests a core and the step's expected memory. The driver and all nodes must see the cache folder under the same path.
If a node dies or its memory runs out, the step is repeated, possibly elsewhere, in a new folder: a lost node's late
writes are never read. If the driver dies, Ray ends its tasks, and published results stay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from sdflow.errors import PassError, SdflowError
from sdflow.machine.packages import found_version
from sdflow.processes.in_worker import error_message
from sdflow.processes.on_ray.cluster import connect
from sdflow.processes.worker_group import LOOK_SECONDS, Layers, Needs, Work, WorkerGroup
from sdflow.processes.workers import WorkerResult, rebuilt_error

LOG_BYTES = 1 << 20
"""Bytes at the end of a worker's output that are sent to the driver."""

_groups: list[WorkerGroup] = []

ATTEMPTS = 4
"""Maximum attempts of a step whose node is lost."""


class RayGroup(WorkerGroup):
    """The workers of one run on a cluster; a context manager that holds the connection.

    address: from `ray_address`. jobs: maximum number of concurrent steps; None: twice the cluster's cores, since
    pipelines that wait for another one's step count too, and Ray queues tasks without a core.
    Entering raises UsageError if Ray is not installed or there is no cluster.
    """

    def __init__(self, address: str, jobs: int | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        super().__init__(jobs, say)
        self._ray = connect(address)
        self._tasks: set[Any] = set()
        self.jobs = jobs or max(2, 2 * int(self._ray.cluster_resources().get("CPU", 1)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._ray.shutdown()

    def _may_start(self, alone: bool) -> bool:
        return self._turns < self.jobs  # Ray schedules by the task's requested resources

    @cached_property
    def _announcements(self) -> Any:
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Announcements)
        return actor.remote()

    def _run(self, work: Work) -> WorkerResult:
        """Run on a node if the worker writes to the request's empty folder `out`; otherwise here.

        Raises PassError if its nodes are lost repeatedly.
        """
        if "out" not in work.request or not work.needs.anywhere:
            return super()._run(work)
        out, lost = Path(work.request["out"]), ""
        for attempt in range(ATTEMPTS):
            self.check()
            if lost:
                work.on_phase(f"{lost}; starting again")
            place = out.with_name(f"{out.name}-{attempt}")
            place.mkdir()
            name = uuid.uuid4().hex
            try:
                task = self._task(work.needs).remote(
                    work.module,
                    {**work.request, "out": str(place)},
                    dict(work.environment),
                    work.imported,
                    work.needs.versions,
                    self._announcements,
                    name,
                )
                answer = self._wait(task, name, work.on_phase, work.on_memory)
            except self._lost as error:
                self.check(error)
                lost = f"its node was lost ({type(error).__name__})"
                continue
            work.log.write_text(answer["log"])
            if "error" in answer:
                shutil.rmtree(out)
                place.rename(out)
                raise rebuilt_error(answer["error"], work.log)
            out.rmdir()
            place.rename(out)
            return WorkerResult(answer["result"], answer["seconds"], answer["peak_memory"])
        raise PassError(
            f"{lost}, {ATTEMPTS} times",
            remedy="Check Ray's log and the nodes' memory: `ray status`, `ray list nodes`.",
        )

    @property
    def _lost(self) -> tuple[type[Exception], ...]:
        errors = self._ray.exceptions
        return (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.LocalRayletDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        )

    @cached_property
    def _step(self) -> Any:
        return self._ray.remote(max_retries=0)(run_step)

    def _task(self, needs: Needs) -> Any:
        """The task of a step with its resources, limited to the largest node's, without which it would wait forever."""
        alive = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        most = max((int(each.get("memory", 0)) for each in alive), default=0)
        memory = min(needs.memory, most)
        return self._step.options(num_cpus=1, memory=memory)

    def _wait(
        self, task: Any, name: str, on_phase: Callable[[str], None], on_memory: Callable[[int], None]
    ) -> dict[str, Any]:
        with self._changed:
            if self._ended:
                self._cancel(task)
            self._tasks.add(task)
        heard: dict[str, Callable[[Any], None]] = {"phase": on_phase, "memory": on_memory}
        try:
            while True:
                self.check()
                ready, _ = self._ray.wait([task], timeout=LOOK_SECONDS)
                with suppress(self._ray.exceptions.RayError):  # its node died: Ray restarts it
                    for kind, value in self._ray.get(self._announcements.take.remote(name), timeout=LOOK_SECONDS):
                        heard[kind](value)
                if ready:
                    found: dict[str, Any] = self._ray.get(task)
                    return found
        except self._ray.exceptions.TaskCancelledError as error:
            self.check(error)
            raise
        finally:
            with self._changed:
                self._tasks.discard(task)

    def _cancel(self, task: Any) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.cancel(task, force=True)

    def end(self) -> None:
        """End every worker at once, here and on all nodes."""
        super().end()
        with self._changed:
            tasks = list(self._tasks)
        for task in tasks:
            self._cancel(task)


def run_step(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    imported: Layers,
    versions: Mapping[str, str],
    announcements: Any,
    step: str,
) -> dict[str, Any]:
    """Run `python -m module` on the request. announcements: the actor that receives the worker's messages under the
    step's name.

    Returns {"result":, "seconds":, "peak_memory":, "log":} or {"error": as in `error_message`, "log":}.
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
    """Queues steps' messages until the driver takes them. Runs as an actor near the driver."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[str, Any]]] = {}

    def put(self, step: str, kind: str, value: Any) -> None:
        """Queue a message; only the latest memory value is kept."""
        waiting = self._waiting.setdefault(step, [])
        if kind == "memory" and waiting and waiting[-1][0] == "memory":
            waiting.pop()
        waiting.append((kind, value))

    def take(self, step: str) -> list[tuple[str, Any]]:
        """Take the messages since the last call."""
        return self._waiting.pop(step, [])


def _require_versions(versions: Mapping[str, str]) -> None:
    """Raises PassError if this node's packages differ from the driver's."""
    different = []
    for name, wanted in versions.items():
        found = found_version(name)
        if found != wanted:
            different.append(f"{name} {wanted} is required, but {found or 'none'} is installed")
    if different:
        raise PassError(
            f"the node {os.uname().nodename} has other packages: " + "; ".join(different),
            remedy="Install the driver's versions on every node: they are part of a result's key.",
        )


def _require_shared(out: Path) -> None:
    """Raises PassError if this node does not see the driver's folder."""
    if not out.is_dir():
        raise PassError(
            f"the node {os.uname().nodename} does not see it",
            where=str(out),
            remedy="Put the cache, checkpoints and LoRAs into a folder that all nodes share under the same path (--cache).",
        )


def _end_of(log: Path) -> str:
    return log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""
