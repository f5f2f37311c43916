"""Runs a Plan: every step that is not cached, in order, each in a process of its own.

For each chain, from its first step on:

    action = the step's key, now that its input is known
    if the cache has the action: go on with its artifact
    else, holding the action's lock: look again (another process may just have built it);
        check the input's content; run the pass into staging; check the pass's and the workflow's promises; publish

A corrupt artifact that is about to be read goes to quarantine, and the chain starts again from its first step: all that
is sound is found in the cache. A failure publishes nothing.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sdflow.artifact import Action, Facts, Record
from sdflow.errors import PassError, VerificationError
from sdflow.plan import Chain, PipelinePlan, Step
from sdflow.store import Cache, CorruptArtifactError, Staging
from sdflow.workers import WorkerResult, run_worker

WORKER = "sdflow.passes.worker"

Outcome = Literal["cached", "built", "checked"]


@dataclass(frozen=True)
class FinishedStep:
    """A step after execution. "checked": built again beside the cached result, with an equal digest."""

    step: Step
    outcome: Outcome
    record: Record


class Listener(Protocol):
    """Observes an execution; decides nothing. `note` is for what concerns no single step."""

    def note(self, text: str) -> None: ...
    def started(self, step: Step) -> None: ...
    def phase(self, step: Step, phrase: str) -> None: ...
    def memory(self, step: Step, resident: int) -> None: ...
    def finished(self, result: FinishedStep) -> None: ...


@dataclass
class Executor:
    """How to run steps.

    rebuild: build every step anew, once per run, and replace its entry (`--clean_cache`).
    check: build cached steps again and compare digests, without replacing anything (`--check`).
    keep_failed: leave the staging folder of a failed pass for inspection.
    """

    cache: Cache
    listener: Listener
    rebuild: bool = False
    check: bool = False
    keep_failed: bool = False
    done: set[str] = field(default_factory=set)

    def run(self, plan: PipelinePlan) -> Mapping[str, tuple[FinishedStep, ...]]:
        """Run every chain of a pipeline; returns submodel -> its finished steps.

        Raises PassError when a pass fails, CacheError when the cache cannot be written, VerificationError when
        `check` finds a step that does not give the same bytes again.
        """
        return {chain.submodel: self._run_chain(chain) for chain in plan.chains}

    def _run_chain(self, chain: Chain) -> tuple[FinishedStep, ...]:
        assert chain.source is not None, "planned with download=True"
        for _ in chain.steps:
            try:
                return self._try_chain(chain, chain.source.identity, chain.source.load)
            except CorruptArtifactError as corrupt:
                self.listener.phase(chain.steps[0], f"{corrupt.what}: building it again")
        return self._try_chain(chain, chain.source.identity, chain.source.load)

    def _try_chain(
        self, chain: Chain, identity: Mapping[str, Any], load: Mapping[str, Any]
    ) -> tuple[FinishedStep, ...]:
        finished: list[FinishedStep] = []
        for step in chain.steps:
            before = finished[-1].record if finished else None
            action = step.action(before.artifact.digest if before else identity, self.cache.salt)
            self.listener.started(step)
            result = self._run_step(step, action, before, load if before is None else {})
            self.cache.remember_step(step.id, action)
            self.listener.finished(result)
            finished.append(result)
        return tuple(finished)

    def _run_step(self, step: Step, action: Action, before: Record | None, load: Mapping[str, Any]) -> FinishedStep:
        if not (self.rebuild and action.digest not in self.done):
            cached = self.cache.lookup(action)
            if cached is not None:
                return self._accept(step, action, cached, before, load)
        with self.cache.lock(action, waiting=lambda: self.listener.phase(step, "another process is building it")):
            if not (self.rebuild and action.digest not in self.done):
                cached = self.cache.lookup(action)
                if cached is not None:
                    return self._accept(step, action, cached, before, load)
            record = self._build(step, action, before, load, compare_with=None)
        self.done.add(action.digest)
        return FinishedStep(step, "built", record)

    def _accept(
        self, step: Step, action: Action, cached: Record, before: Record | None, load: Mapping[str, Any]
    ) -> FinishedStep:
        check_expectations(step, cached.facts)
        if not self.check or action.digest in self.done:
            return FinishedStep(step, "cached", cached)
        self._build(step, action, before, load, compare_with=cached)
        self.done.add(action.digest)
        return FinishedStep(step, "checked", cached)

    def _build(
        self,
        step: Step,
        action: Action,
        before: Record | None,
        load: Mapping[str, Any],
        *,
        compare_with: Record | None,
    ) -> Record:
        if before is not None:
            self.cache.check(before.artifact)
        with self.cache.staging(action, keep_failed=self.keep_failed) as staging:
            try:
                worker = self._run_worker(step, before, load, staging)
                check_expectations(step, worker.value)
            except PassError as error:
                kept = f"\n  what it wrote is kept in {staging.path}-failed" if self.keep_failed else ""
                place = f"{step.id} {step.name}" + (f" at {error.where}" if error.where else "")
                raise PassError(error.what, where=place, remedy=(error.remedy or "") + kept or None) from error
            if compare_with is not None:
                _compare(step, staging.tree_digest(), compare_with)
                return compare_with
            if self.rebuild:
                self.cache.forget(action)
            built = {
                "seconds": round(worker.seconds, 3),
                "peak_memory": worker.peak_memory,
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            return staging.publish(worker.value, built)

    def _run_worker(self, step: Step, before: Record | None, load: Mapping[str, Any], staging: Staging) -> WorkerResult:
        request = {
            "pass": step.spec.pass_name,
            "base": str(step.base.absolute()),
            "submodel": step.submodel,
            "model": str(before.artifact.path.absolute()) if before else None,
            "checkpoint": load,
            "loras": [{"path": str(lora.path.absolute()), "scale": lora.scale} for lora in step.loras],
            "config": step.config,
            "out": str(staging.files.absolute()),
        }
        with tempfile.TemporaryDirectory(prefix="sdflow-log-") as folder:
            log = Path(folder) / "log.txt"
            try:
                return run_worker(
                    WORKER,
                    request,
                    log=log,
                    on_phase=lambda phrase: self.listener.phase(step, phrase),
                    on_memory=lambda resident: self.listener.memory(step, resident),
                )
            except PassError:
                if self.keep_failed:
                    shutil.copy(log, staging.path)
                raise


def _compare(step: Step, again: str, cached: Record) -> None:
    if again != cached.artifact.digest:
        raise VerificationError(
            f"built again it gives {again[:12]}, the cache has {cached.artifact.digest[:12]}",
            where=f"{step.id} {step.name}",
            remedy="The pass is not deterministic, or other code built the cached result; --clean_cache replaces it.",
        )


def check_expectations(step: Step, facts: Facts) -> None:
    """Compare the workflow's `expect` with the operators that the pass counted.

    Raises PassError that lists every count that differs.
    """
    operators: Mapping[str, int] = facts.get("operators", {})
    wrong = [
        f"{operator}: expected {count}, found {operators.get(operator, 0)}"
        for operator, count in step.spec.expect.items()
        if operators.get(operator, 0) != count
    ]
    if wrong:
        raise PassError(
            "the result does not have the expected operators: " + "; ".join(wrong),
            where=str(step.spec.mark),
            remedy="if the graph is right, correct `expect`; otherwise a fusion did not match: look at the options",
        )
