"""Concurrent workers: a limit on their number, and a common end.

At most `jobs` run, by default two with two cores. A further worker starts only while the machine has 2 GB of available
memory for each, itself included; the first one always starts. A step that carries a model's weights needs several times
the model's size, so by default it runs alone. The longest chain goes first, and among equals the one with most to
write, since no run is shorter than that.

Workers with known packages are forked from servers that have imported them (`sdflow.processes.worker_server`); a server
starts with the first worker that needs it and ends with the group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sdflow.processes import worker_server
from sdflow.processes.worker_server import NoServerError, WorkerServer
from sdflow.processes.workers import SIDE_BY_SIDE, Start, Worker, WorkerResult, run_worker, spawn

MEMORY_PER_WORKER = 2 * 10**9
DEFAULT_JOBS = min(2, os.cpu_count() or 1)
LOOK_SECONDS = 0.5

Layers = tuple[tuple[str, ...], ...]
"""Modules that a worker has imported at its start, in layers; workers of other kinds share the first layers."""


@dataclass(frozen=True)
class Needs:
    """Requirements of a worker on its machine, where that can be chosen.

    memory: estimated peak in bytes. versions: of distributions that determine its result. anywhere: whether it may run
    on another machine that sees the same files.
    """

    memory: int = MEMORY_PER_WORKER
    versions: Mapping[str, str] = field(default_factory=dict)
    anywhere: bool = False


NEEDS_LITTLE = Needs()


@dataclass(frozen=True)
class Work:
    """One worker's task: the arguments of `WorkerGroup.run`."""

    module: str
    request: Mapping[str, Any]
    log: Path
    on_phase: Callable[[str], None]
    on_memory: Callable[[int], None]
    environment: Mapping[str, str]
    imported: Layers
    needs: Needs


class GroupEndedError(Exception):
    """The group ended while this was waiting or running. Only for threads: whoever ended it knows why."""


class WorkerGroup:
    """The workers of one run, each driven by a thread; a context manager at whose end none is left.

    jobs: maximum number of concurrent workers; None: the defaults above. say: called if workers start slower than
    possible.
    """

    def __init__(self, jobs: int | None = None, say: Callable[[str], None] = lambda text: None) -> None:
        self.jobs = jobs or DEFAULT_JOBS
        self._heavy_run_alone = jobs is None
        self._changed = threading.Condition()
        self._turns = 0
        self._waiting: list[tuple[int, int]] = []
        self._alone = False
        self._running: set[Worker] = set()
        self._ended = False
        self._say = say
        self._starting = threading.RLock()
        self._starts: dict[Layers, Start] = {(): spawn}
        self._servers: list[WorkerServer] = []

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in reversed(self._servers):
            server.end()

    @contextmanager
    def turn(
        self, *, heavy: bool, left: int = 1, size: int = 0, arrived: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Wait until another worker may run. heavy: whether it carries weights. Raises GroupEndedError.

        left: number of workers that will run in sequence, including this one; the largest number goes first, and among
        equals the largest size in bytes. arrived: called once this one is counted as waiting.
        """
        alone = heavy and self._heavy_run_alone
        rank = (left, size)
        with self._changed:
            self._waiting.append(rank)
            arrived()
            try:
                while rank < max(self._waiting) or not self._may_start(alone):
                    self.check()
                    self._changed.wait(LOOK_SECONDS)
                self.check()
            finally:
                self._waiting.remove(rank)
                self._changed.notify_all()
            self._turns += 1
            self._alone = alone
        try:
            yield
        finally:
            with self._changed:
                self._turns -= 1
                self._changed.notify_all()

    def _may_start(self, alone: bool) -> bool:
        if self._turns == 0:
            return True
        if alone or self._alone or self._turns >= self.jobs:
            return False
        import psutil

        return bool(psutil.virtual_memory().available >= MEMORY_PER_WORKER * (self._turns + 1))

    def run(
        self,
        module: str,
        request: Mapping[str, Any],
        *,
        log: Path,
        on_phase: Callable[[str], None],
        on_memory: Callable[[int], None] = lambda resident: None,
        environment: Mapping[str, str] = SIDE_BY_SIDE,
        imported: Layers = (),
        needs: Needs = NEEDS_LITTLE,
    ) -> WorkerResult:
        """`run_worker` as part of the group, with `imported` preloaded. needs: for groups that choose a machine. Raises
        GroupEndedError if the group ends meanwhile."""
        return self._run(Work(module, request, log, on_phase, on_memory, environment, imported, needs))

    def _run(self, work: Work) -> WorkerResult:
        started: list[Worker] = []

        def add(worker: Worker) -> None:
            self._add(worker)
            started.append(worker)

        try:
            start = self._start(work.imported if worker_server.AVAILABLE else ())
            return run_worker(
                work.module,
                work.request,
                log=work.log,
                environment=work.environment,
                on_phase=work.on_phase,
                on_memory=work.on_memory,
                on_start=add,
                start=start,
            )
        except Exception as error:  # the end of the group takes precedence over the worker's error
            self.check(error)  # it was killed: its error is irrelevant
            raise
        finally:
            with self._changed:
                self._running.difference_update(started)

    def _start(self, layers: Layers) -> Start:
        """How to start a worker with these layers imported. The first one starts the server for it, and waits."""
        with self._starting:
            if layers not in self._starts:
                below = self._start(layers[:-1])
                try:
                    server = WorkerServer(layers[-1], below, self._add)
                except NoServerError as error:
                    self.check(error)
                    self._say(f"each step imports {', '.join(layers[-1])} again: {error}")
                    self._starts[layers] = below
                else:
                    self._servers.append(server)
                    self._starts[layers] = server.fork
            return self._starts[layers]

    def _add(self, worker: Worker) -> None:
        with self._changed:
            self.check()
            self._running.add(worker)

    def check(self, cause: Exception | None = None) -> None:
        """Raise GroupEndedError if the group has ended."""
        if self._ended:
            raise GroupEndedError from cause

    def end(self) -> None:
        """Kill every worker at once, and start no more."""
        with self._changed:
            self._ended = True
            for worker in self._running:
                worker.kill()
            self._changed.notify_all()
