"""Runs one chain: every step that is not cached runs in its own process.

For each step, from the first:

    action = the step's key, now that its input is known
    if the cache has the action: continue with its artifact
    else, holding the action's lock: look again (another process may have built it); fetch it from the remote cache;
        check the input's content; run the pass into staging; check the pass's and the workflow's promises; publish

A corrupt artifact found on reading is quarantined, and the chain restarts from its first step; intact results are still
cached. If a pass without weights reads one, the chain restarts with the weights carried, and a note says so. A
checkpoint, LoRA or script that changed after it was hashed ends the run. A failure publishes nothing.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sdflow.artifact import WEIGHTS_FILE, Action, Facts, Record
from sdflow.build.chain import Chain, reads_weights, remember_reading
from sdflow.build.compared_base import ComparedBase, compared_base
from sdflow.build.imported import not_here
from sdflow.build.listener import FinishedStep, Listener
from sdflow.build.step import Step
from sdflow.disk.file_stamp import check_stamps
from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import CheckpointError, DamagedBase, InputChanged, PassError, VerificationError, WeightValueRead
from sdflow.passes.outcome import require_model
from sdflow.passes.registry import APPENDED, OWN
from sdflow.processes.worker_group import MEMORY_PER_WORKER, Needs, WorkerGroup
from sdflow.processes.workers import WorkerResult
from sdflow.store import Cache, CorruptArtifactError, Staging
from sdflow.weights.finite import words_beyond_float16
from sdflow.weights.stream import PAGE_SUMS

WORKER = "sdflow.passes.worker"


@dataclass
class ChainRun:
    """One run of a chain, in a thread of its own.

    rebuild, check, keep_failed: see `sdflow.build.execute.Executor`. anew: the actions that rebuild or check has
    already built in this execution, shared by all its chains. targets: pipeline -> its target. arrived: set once the
    chain builds, waits for its turn, or has ended.
    """

    cache: Cache
    listener: Listener
    group: WorkerGroup
    targets: Mapping[str, str]
    anew: set[str]
    rebuild: bool = False
    check: bool = False
    keep_failed: bool = False
    arrived: threading.Event = field(default_factory=threading.Event)
    _left: int = field(default=0, init=False)  # number of unfinished steps

    def run(self, chain: Chain) -> tuple[FinishedStep, ...]:
        try:
            try:
                return self._run_steps(chain.steps)
            except WeightValueRead as read:
                if not chain.carried:
                    raise
                self.listener.note(
                    f"{read.where}: {read.what}; building {chain.submodel} with its weights carried instead"
                )
            return self._run_steps(chain.carried)
        finally:
            self.arrived.set()

    def _run_steps(self, steps: Sequence[Step]) -> tuple[FinishedStep, ...]:
        mended = 0
        while True:
            try:
                return self._try_steps(steps)
            except CorruptArtifactError as corrupt:
                if mended == len(steps):  # once per artifact; more points to a lasting cause
                    raise
                mended += 1
                self.listener.phase(steps[0], f"{corrupt.what}: building it again")

    def _try_steps(self, steps: Sequence[Step]) -> tuple[FinishedStep, ...]:
        finished: list[FinishedStep] = []
        for step in steps:
            self._left = len(steps) - len(finished)
            self.group.check()
            before = finished[-1].record if finished else None
            if not step.has_key:
                raise not_here([step], self.targets)
            action = step.action(before.artifact.digest if before else None, self.cache.salt)
            try:
                result = self._run_step(step, action, before)
            except (PassError, CheckpointError) as error:
                if not isinstance(error, WeightValueRead | DamagedBase | InputChanged):  # not the step's fault
                    said = str(error).removeprefix(f"{step.id} {step.name}").lstrip(": ")
                    self.cache.notes.remember_failure(step.id, action, said)
                raise
            if result.outcome != "fetched":
                self.cache.offer(result.record)
            self.cache.notes.remember_step(step.id, action)
            self.listener.finished(result)
            if warning := _beyond_float16(step, result.record.facts):
                self.listener.note(f"{step.pipeline} {step.submodel}: {warning}")
            finished.append(result)
        return tuple(finished)

    def _run_step(self, step: Step, action: Action, before: Record | None) -> FinishedStep:
        fresh = self.rebuild and action.digest not in self.anew
        cached = None if fresh else self.cache.lookup(action)
        if cached is not None:
            return self._accept(step, action, cached, before)
        with self.cache.lock(
            action,
            waiting=lambda: self.listener.phase(step, "another process is building it"),
            meanwhile=self.group.check,
        ):
            fresh = fresh and action.digest not in self.anew  # another pipeline may have built it by now
            cached = None if fresh else self.cache.lookup(action)
            if cached is not None:
                return self._accept(step, action, cached, before)
            fetched = None if fresh else self._fetch(step, action)
            if fetched is not None:
                accepted = self._accept(step, action, fetched, before)
                return FinishedStep(step, "fetched", fetched) if accepted.outcome == "cached" else accepted
            record = self._build(step, action, before, compare_with=None)
            self.anew.add(action.digest)
        return FinishedStep(step, "built", record)

    def _fetch(self, step: Step, action: Action) -> Record | None:
        """The result from the remote cache, if there is one that meets the workflow's `expect`."""
        record = self.cache.fetch(action, self.group.check)
        if record is None:
            return None
        try:
            check_expectations(step, record.facts)
        except PassError as error:
            self.listener.note(f"{step.id} {step.name}: not taken from the remote cache: {error.what}")
            self.cache.forget(action)
            return None
        return record

    def _accept(self, step: Step, action: Action, cached: Record, before: Record | None) -> FinishedStep:
        check_expectations(step, cached.facts)
        if not self.check or action.digest in self.anew:
            return FinishedStep(step, "cached", cached)
        self._build(step, action, before, compare_with=cached)
        self.anew.add(action.digest)
        return FinishedStep(step, "checked", cached)

    def _build(self, step: Step, action: Action, before: Record | None, *, compare_with: Record | None) -> Record:
        if step.weights == "symbolic" and not self.rebuild and reads_weights(action, self.cache):
            raise WeightValueRead("an earlier run found that it reads weights", where=f"{step.id} {step.name}")
        if step.lacks:
            raise not_here([step], self.targets)
        with (
            self.group.turn(
                heavy=step.weights == "carried", left=self._left, size=_weights(before), arrived=self.arrived.set
            ),
            self.cache.staging(action, keep_failed=self.keep_failed) as staging,
        ):
            self.listener.started(step)
            if before is not None:
                self.cache.check(before.artifact)
            base = None if self.rebuild or compare_with is not None else self._bound_without_loras(step, before)
            worker = self._run_pass(step, action, before, base, staging)
            if compare_with is not None:
                _compare(step, staging.tree_digest(), compare_with)
                return compare_with
            if self.rebuild:
                self.cache.forget(action)
            return self._publish(step, worker, base, staging)

    def _run_pass(
        self, step: Step, action: Action, before: Record | None, base: ComparedBase | None, staging: Staging
    ) -> WorkerResult:
        """Fill `staging` and check the promises of the pass and the workflow. A PassError names the step."""
        try:
            worker = self._run_worker(step, before, base, staging)
            check_expectations(step, worker.value["facts"])
            if step.name not in OWN | APPENDED:  # other people's passes are not trusted
                require_model(staging.files, step.name)
        except DamagedBase:
            assert base is not None
            base.remember(None, self.cache.stat)  # if the file is intact, the recorded sums are wrong
            self.cache.check(base.record.artifact)  # quarantines it: the next attempt runs without it
            raise
        except PassError as error:
            if isinstance(error, WeightValueRead):
                remember_reading(action, self.cache)
            kept = f"\n  its output is kept in {staging.path}-failed" if self.keep_failed else ""
            place = f"{step.id} {step.name}" + (f" at {error.where}" if error.where else "")
            raise type(error)(error.what, where=place, remedy=(error.remedy or "") + kept or None) from error
        return worker

    def _publish(self, step: Step, worker: WorkerResult, base: ComparedBase | None, staging: Staging) -> Record:
        facts = worker.value["facts"]
        built = {
            "seconds": round(worker.seconds, 3),
            "peak_memory": worker.peak_memory,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if step.weights != "bound":
            return staging.publish(facts, built)
        # BindWeights hashes its output while writing; it is not read again.
        sums, base_sums = worker.value["sums"]
        if base is not None and base_sums:
            base.remember(base_sums, self.cache.stat)
        noted = [(WEIGHTS_FILE, PAGE_SUMS, sums)] if sums else []
        return staging.publish(facts, built, worker.value["digests"], noted)

    def _bound_without_loras(self, step: Step, before: Record | None) -> ComparedBase | None:
        """The same model without LoRAs, if cached: parts that the LoRAs leave unchanged are copied from it."""
        if step.weights != "bound" or not step.loras or before is None:
            return None
        record = self.cache.lookup(step.without_loras().action(before.artifact.digest, self.cache.salt))
        return None if record is None else compared_base(record, self.cache.stat)

    def _run_worker(
        self, step: Step, before: Record | None, base: ComparedBase | None, staging: Staging
    ) -> WorkerResult:
        request = {
            "pass": step.spec.pass_name,
            "folder": str(step.folder.absolute()),
            "submodel": step.submodel,
            "model": str(before.artifact.path.absolute()) if before else None,
            "base_model": str(base.record.artifact.path.absolute()) if base else None,
            "base_sha256": base.sha256 if base else None,
            "base_sums": base.sums if base else None,
            "symbolic": step.weights == "symbolic",
            "checkpoint": step.load,
            "family": step.family,
            "loras": [{"path": str(lora.path.absolute()), "scale": lora.scale} for lora in step.loras],
            "config": step.config,
            "out": str(staging.files.absolute()),
        }
        check_stamps(step.stamps)
        with scratch_folder("log") as folder:
            log = folder / "log.txt"
            try:
                result = self.group.run(
                    WORKER,
                    request,
                    log=log,
                    on_phase=lambda phrase: self.listener.phase(step, phrase),
                    on_memory=lambda resident: self.listener.memory(step, resident),
                    imported=step.imported,
                    needs=Needs(_memory(step, before), step.uses, anywhere=True),
                )
            except (PassError, CheckpointError) as error:
                if self.keep_failed and isinstance(error, PassError):
                    shutil.copy(log, staging.path)
                check_stamps(step.stamps)  # a change may be the cause of the failure
                raise
        check_stamps(step.stamps)  # the files stayed unchanged until the end
        if base is not None:
            base.check()
        return result


def _beyond_float16(step: Step, facts: Facts) -> str | None:
    files = [stamp["path"] for stamp in step.load.get("files", ())]
    return words_beyond_float16(
        facts,
        [f"{lora.path} at scale {lora.scale:g}" for lora in step.loras],
        files[0] if len(files) == 1 else "the checkpoint",
    )


def _weights(record: Record | None) -> int:
    """Bytes of the weights of an artifact's graph, whether stored or not."""
    return sum(each["bytes"] for each in record.facts.get("dtypes", {}).values()) if record else 0


def _memory(step: Step, before: Record | None) -> int:
    """Estimated peak memory of a step in bytes: a pass that carries weights was measured to hold up to four copies."""
    if step.weights != "carried":
        return MEMORY_PER_WORKER // (2 if step.weights == "bound" else 1)
    return MEMORY_PER_WORKER + 4 * (_weights(before) or sum(stamp["size"] for stamp in step.stamps))


def _compare(step: Step, again: str, cached: Record) -> None:
    if again != cached.artifact.digest:
        raise VerificationError(
            f"the rebuild gives {again[:12]}, the cache has {cached.artifact.digest[:12]}",
            where=f"{step.id} {step.name}",
            remedy="The pass is not deterministic, or other code built the cached result; --clean_cache replaces it.",
        )


def check_expectations(step: Step, facts: Facts) -> None:
    """Compare the workflow's `expect` with the operators that the pass counted.

    Raises PassError with every count that differs.
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
