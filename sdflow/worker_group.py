"""Workers side by side: how many at a time, and all of them ended together.

How many: at most `jobs`, by default two where there are two cores. A further worker starts only while the machine has
2 GB of memory available for each, itself included; the first one always starts. A step that carries a model's weights
needs several times the model's size, so by default it runs alone.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdflow.workers import WorkerResult, run_worker

MEMORY_PER_WORKER = 2 * 10**9
DEFAULT_JOBS = min(2, os.cpu_count() or 1)
LOOK_SECONDS = 0.5


class GroupEndedError(Exception):
    """The group was ended while this was waiting or running. For threads only: whoever ended it knows why."""


class WorkerGroup:
    """The workers of one run, each driven by a thread. jobs: how many at a time; None: the defaults above."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or DEFAULT_JOBS
        self._heavy_run_alone = jobs is None
        self._changed = threading.Condition()
        self._turns = 0
        self._alone = False
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    @contextmanager
    def turn(self, *, heavy: bool) -> Iterator[None]:
        """Wait until one more worker may run. heavy: it carries weights. Raises GroupEndedError."""
        alone = heavy and self._heavy_run_alone
        with self._changed:
            while not self._may_start(alone):
                self.check()
                self._changed.wait(LOOK_SECONDS)
            self.check()
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
        on_memory: Callable[[int], None],
    ) -> WorkerResult:
        """`run_worker`, as one of the group. Raises GroupEndedError when the group is ended meanwhile."""
        started: list[subprocess.Popen[bytes]] = []

        def add(process: subprocess.Popen[bytes]) -> None:
            with self._changed:
                self.check()
                self._running.add(process)
            started.append(process)

        try:
            return run_worker(module, request, log=log, on_phase=on_phase, on_memory=on_memory, on_start=add)
        except Exception as error:
            self.check(error)  # it was killed: what it died of says nothing
            raise
        finally:
            with self._changed:
                self._running.difference_update(started)

    def check(self, cause: Exception | None = None) -> None:
        """Raise GroupEndedError if the group was ended."""
        if self._ended:
            raise GroupEndedError from cause

    def end(self) -> None:
        """Kill every worker at once. Nothing starts any more."""
        with self._changed:
            self._ended = True
            for process in self._running:
                process.kill()
            self._changed.notify_all()
