"""Run a Plan: its pipelines and their chains in parallel threads; `sdflow.build.chain_run` runs one chain.

The first failure or interrupt ends all workers and is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sdflow import stop
from sdflow.build.chain_run import ChainRun
from sdflow.build.listener import FinishedStep, Listener, Steps
from sdflow.build.plan import PipelinePlan
from sdflow.processes.worker_group import GroupEndedError, WorkerGroup
from sdflow.store import Cache

T = TypeVar("T")

ARRIVAL_SECONDS = 0.3
"""Maximum time that other chains wait for a longer one to finish its lookups, so that it can build first."""


@dataclass
class Executor:
    """How to run steps.

    rebuild: build every step again, once per run, and replace its entry (`--clean_cache`).
    check: build cached steps again and compare digests, without replacing anything (`--check`).
    keep_failed: keep the staging folder of a failed pass for inspection.
    jobs: maximum number of concurrent steps; None: see `sdflow.processes.worker_group`.
    workers: creates the worker group from `jobs` and a function that receives notes.
    """

    cache: Cache
    listener: Listener
    rebuild: bool = False
    check: bool = False
    keep_failed: bool = False
    jobs: int | None = None
    workers: Callable[[int | None, Callable[[str], None]], WorkerGroup] = WorkerGroup
    _anew: set[str] = field(default_factory=set, init=False)  # actions built by `rebuild` or `check`

    def __post_init__(self) -> None:
        if self.cache.remote is not None:
            self.cache.remote.tell = self.listener.note

    def run(self, plan: PipelinePlan) -> Steps:
        """Run every chain of a pipeline. Returns submodel -> its finished steps.

        Raises PassError if a pass fails, CacheError if the cache cannot be written, VerificationError if `check` finds
        a step that does not reproduce its bytes.
        """
        with self._group() as group:
            return self._run_pipeline(plan, group)

    def run_all(
        self, plans: Sequence[PipelinePlan], then: Callable[[PipelinePlan, Steps, float, WorkerGroup], T]
    ) -> list[T]:
        """Run pipelines, as many in parallel as steps may run. `then` is called for each finished one with its start
        (`time.perf_counter`) and the worker group, for more workers, which end with the group.

        Shared steps are built once. Returns the results of `then`, in order. Raises as `run` does; the first failure
        ends all others.
        """

        def run(plan: PipelinePlan) -> T:
            group.check()
            begun = time.perf_counter()
            return then(plan, self._run_pipeline(plan, group), begun, group)

        with self._group() as group, ThreadPoolExecutor(group.jobs) as threads:
            try:
                futures = [threads.submit(run, plan) for plan in plans]
                _wait(futures)
            except BaseException:
                group.end()
                raise
        return [future.result() for future in futures]

    def _group(self) -> WorkerGroup:
        return self.workers(self.jobs, self.listener.note)

    def _run_pipeline(self, plan: PipelinePlan, group: WorkerGroup) -> Steps:
        # The group gives the longest waiting chain precedence. It has the most cached steps to look up, and must not
        # arrive after others have begun.
        chains = plan.together
        longest_first = sorted(chains.items(), key=lambda named: -len(named[1].steps))
        futures: dict[str, Future[tuple[FinishedStep, ...]]] = {}
        with ThreadPoolExecutor(max_workers=max(1, len(chains))) as threads:
            try:  # from the first submit on: an interrupt may come at any time
                for name, chain in longest_first:
                    run = ChainRun(
                        self.cache,
                        self.listener,
                        group,
                        plan.targets,
                        self._anew,
                        rebuild=self.rebuild,
                        check=self.check,
                        keep_failed=self.keep_failed,
                    )
                    futures[name] = threads.submit(run.run, chain)
                    run.arrived.wait(ARRIVAL_SECONDS)
                _wait(list(futures.values()))
            except BaseException:
                group.end()
                raise
        return {name: futures[name].result() for name in chains}


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Wait for all, or until one fails; raises its error."""
    waiting = set(futures)
    while waiting:
        stop.check()
        finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
        failures = [error for error in (future.exception() for future in finished) if error is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, GroupEndedError)):
            raise error
