"""A group whose workers run on the nodes of a Ray cluster.

The driver plans, looks into the cache, holds the locks and publishes, as it does without Ray; what a pass does is done by a
Ray task, which asks for a core and for the memory that the step is expected to need. The cache's folder is one that the driver
and all nodes see under the same path. A step whose node died, or whose memory ran out, is done again, elsewhere if Ray finds
a place, in a folder that is new: whatever a lost node still writes is never read. When the driver dies, Ray ends its tasks,
and what was published stays.
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
from sdflow.processes.on_ray.cluster import connect
from sdflow.processes.worker_group import LOOK_SECONDS, Layers, Needs, Work, WorkerGroup
from sdflow.processes.workers import WorkerResult, error_message, rebuilt_error

LOG_BYTES = 1 << 20
"""Of what a worker printed, so much of the end goes to the driver."""

_groups: list[WorkerGroup] = []

ATTEMPTS = 4
"""So often a step is begun whose node is lost."""


class RayGroup(WorkerGroup):
    """The workers of one run, on a cluster; a context, which is connected to it from the first to the last.

    address: as `ray_address` gives it. jobs: how many steps at a time; None: twice as many as the cluster has cores, since a
    pipeline that waits for a step of another counts too, and Ray keeps what has no core yet.
    Entering raises UsageError when Ray is not installed or there is no cluster.
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
        return self._turns < self.jobs  # the cluster finds the place, by what the task asks for

    @cached_property
    def _announcements(self) -> Any:
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Announcements)
        return actor.remote()

    def _run(self, work: Work) -> WorkerResult:
        """On a node, of a worker that writes to the request's empty folder `out`; of others, here.

        Raises PassError when its nodes were lost again and again.
        """
        if "out" not in work.request or not work.needs.anywhere:
            return super()._run(work)
        out, lost = Path(work.request["out"]), ""
        for attempt in range(ATTEMPTS):
            self.check()
            if lost:
                work.on_phase(f"{lost}; it is begun again")
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
            remedy="Look at Ray's log, and at the memory of the nodes: `ray status`, `ray list nodes`.",
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
        """The task of a step, with what it asks for: never more than the largest node has, or it would wait for ever."""
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
                with suppress(self._ray.exceptions.RayError):  # it was on a node that died: Ray starts it again
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
        """End every worker at once, here and there."""
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
