"""Runs a Plan: its pipelines, and the chains of each, side by side in threads; `sdflow.build.chain_run` is one chain's way.

The first failure, or an interrupt, ends all workers at once, and is what is raised.
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
"""How long other chains wait at most for a longer one to look up what it has, and to be the first to build."""


@dataclass
class Executor:
    """How to run steps.

    rebuild: build every step anew, once per run, and replace its entry (`--clean_cache`).
    check: build cached steps again and compare digests, without replacing anything (`--check`).
    keep_failed: leave the staging folder of a failed pass for inspection.
    jobs: how many steps may run at a time; None: see `sdflow.processes.worker_group`.
    workers: makes the group that runs them, of `jobs` and of what takes notes.
    """

    cache: Cache
    listener: Listener
    rebuild: bool = False
    check: bool = False
    keep_failed: bool = False
    jobs: int | None = None
    workers: Callable[[int | None, Callable[[str], None]], WorkerGroup] = WorkerGroup
    _anew: set[str] = field(default_factory=set, init=False)  # the actions that `rebuild` or `check` have built

    def __post_init__(self) -> None:
        if self.cache.remote is not None:
            self.cache.remote.tell = self.listener.note

    def run(self, plan: PipelinePlan) -> Steps:
        """Run every chain of a pipeline; returns submodel -> its finished steps.

        Raises PassError when a pass fails, CacheError when the cache cannot be written, VerificationError when
        `check` finds a step that does not give the same bytes again.
        """
        with self._group() as group:
            return self._run_pipeline(plan, group)

    def run_all(
        self, plans: Sequence[PipelinePlan], then: Callable[[PipelinePlan, Steps, float, WorkerGroup], T]
    ) -> list[T]:
        """Run pipelines, as many side by side as there may be steps; `then` is called with each that is
        finished, with when it began (`time.perf_counter`), and with the group, for workers of its own: it ends with them.

        What several pipelines share is built once. Returns what `then` gave, in order. Raises as `run` does; the others
        end with the first that fails.
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
        # The group lets the longest chain go first of those that wait: it must not come when others have begun, though it has
        # the most cached steps to look up.
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
    """Wait for all, or until one fails: raises its error."""
    waiting = set(futures)
    while waiting:
        stop.check()
        finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
        failures = [error for error in (future.exception() for future in finished) if error is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, GroupEndedError)):
            raise error
