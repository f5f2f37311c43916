"""`sdflow run`: execute a workflow's plan, then verify, assemble and evaluate its pipelines.

Artifacts that fail stay in the cache without being assembled; an existing pipeline folder stays unchanged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sdflow.bench.evaluate import EvaluationResult, evaluate
from sdflow.build.assemble import assemble, require_replaceable
from sdflow.build.execute import Executor
from sdflow.build.listener import Listener, Steps
from sdflow.build.lock import locked_plan
from sdflow.build.pipeline_folder import content_of, of_refiner
from sdflow.build.plan import PipelinePlan, Plan, make_plan
from sdflow.config.workflow import Workflow
from sdflow.disk.atomic_write import require_makable
from sdflow.disk.file_stamp import check_stamps
from sdflow.disk.locked_folder import remove_abandoned_scratch, scratch_folder
from sdflow.errors import UsageError, VerificationError, os_errors_as, require_utf8
from sdflow.machine.packages import DRAWS, REFERENCE, how_to_install, missing, require_packages
from sdflow.machine.providers import require_package
from sdflow.manifest import REFINER
from sdflow.processes.worker_group import WorkerGroup
from sdflow.run.options import RunOptions
from sdflow.run.provenance import Build, actions_of
from sdflow.store import Cache
from sdflow.store.remote import Claim
from sdflow.targets import TARGETS
from sdflow.verify import Subject, Verification, own_image, verify, write_reports

_ONE_AT_A_TIME = threading.Lock()
"""A verification needs the whole machine: two whole models are in memory in turn."""


@dataclass(frozen=True)
class PipelineResult:
    """A built pipeline: its folder, each submodel's steps, the duration in seconds, its verification and
    measurements."""

    plan: PipelinePlan
    folder: Path
    steps: Steps
    seconds: float
    verification: Verification | None = None
    evaluation: EvaluationResult | None = None

    @property
    def ran(self) -> int:
        """Number of steps that did not come from the cache."""
        return sum(step.ran for chain in self.steps.values() for step in chain)


@dataclass(frozen=True)
class RunResult:
    """The results of a run, and its duration in seconds."""

    pipelines: tuple[PipelineResult, ...]
    seconds: float


def run_workflow(
    workflow: Workflow,
    cache: Cache,
    options: RunOptions,
    listener: Listener,
    planned: Callable[[Plan], None] = lambda plan: None,
) -> RunResult:
    """Build, verify and assemble a workflow's pipelines concurrently; then evaluate them one by one.

    planned: called with the plan before anything runs; an exception ends the run.
    Raises a subclass of SdflowError for the failure; pipelines finished before stay finished.
    """
    started = time.perf_counter()
    remove_abandoned_scratch()
    for folder, option in ((options.out, "--out"), (options.results, "--results")):
        require_utf8(str(folder.resolve()), option)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file, not a folder", where=option, remedy="Name another folder.")
        with os_errors_as(f"{folder} cannot be created", option, "Name another folder."):
            require_makable(folder)
    workers = _workers(options.on)
    if options.require_target and options.evaluate:
        require_packages("measuring on the target, which --require-target demands,", *DRAWS)
    if options.require_target:  # check before building
        for pipeline in workflow.pipelines:
            require_package(TARGETS[pipeline.target])
    written = [(file, cache.stat.digest(file)) for file in workflow.files or (workflow.path,)]
    plan = (locked_plan if options.locked else make_plan)(workflow, cache, download=True)
    for each in plan.pipelines:
        require_replaceable(options.out / each.pipeline.name, cache)
    anew = options.rebuild or options.check
    plan.require_buildable(cache, rebuild=anew)
    listener.expected(plan.expected(cache, anew=anew))
    planned(plan)
    executor = Executor(
        cache,
        listener,
        rebuild=options.rebuild,
        check=options.check,
        keep_failed=options.keep_failed,
        jobs=options.jobs,
        workers=workers,
    )
    with cache.lease():
        finished = executor.run_all(
            plan.pipelines,
            lambda pipeline, steps, begun, group: _assemble(pipeline, steps, begun, group, executor, options, written),
        )
        evaluated = [_evaluate(pipeline, executor, options) for pipeline in finished]
    return RunResult(tuple(evaluated), time.perf_counter() - started)


def _workers(on: str | None) -> Callable[[int | None, Callable[[str], None]], WorkerGroup]:
    """A factory for the group that runs the steps. Raises UsageError for an invalid cluster."""
    if on is None:
        return WorkerGroup
    from sdflow.processes.on_ray.cluster import ray_address
    from sdflow.processes.on_ray.group import RayGroup

    return partial(RayGroup, ray_address(on))


def _assemble(
    plan: PipelinePlan,
    steps: Steps,
    begun: float,
    group: WorkerGroup,
    executor: Executor,
    options: RunOptions,
    written: Sequence[tuple[Path, str]],
) -> PipelineResult:
    folder = options.out / plan.pipeline.name
    started = datetime.now(UTC) - timedelta(seconds=time.perf_counter() - begun)
    if options.copy:
        for chain in steps.values():
            executor.cache.check(chain[-1].record.artifact)
    refiner = plan.refiner
    assert plan.checkpoint is not None, "planned with download=True"
    stamps = [*plan.checkpoint.companion_stamps]
    if refiner is not None and refiner.checkpoint is not None:
        stamps += refiner.checkpoint.companion_stamps

    def check() -> None:
        group.check()
        check_stamps(stamps)  # the copied files must be the verified ones

    checked = plan.pipeline.verify if options.verify else None
    if checked is not None and (absent := missing(*REFERENCE)):
        executor.listener.note(
            f"{plan.pipeline.name}: not verified against PyTorch: {', '.join(absent)} "
            f"{'are' if len(absent) > 1 else 'is'} not installed ({how_to_install(*absent)})"
        )
        checked = None
    level = checked.level if checked else None
    content = content_of(plan, steps, verified=level)
    inside = None if refiner is None else content_of(refiner, of_refiner(steps), verified=level)
    what: dict[str, Any] = {**vars(content), "refiner": inside, "check": check}
    verification = None
    if checked is not None:
        with scratch_folder("verify") as scratch:
            trial = scratch.resolve() / "trial" / plan.pipeline.name  # the scratch folder itself stays locked
            assemble(trial, **what)
            with _alone(group):
                failed = (
                    f"Nothing was assembled: {folder} is unchanged. To build it without verification, use `verify: false` or "
                    "--no-verify (for bake, leave out --verify)."
                )
                verification = _verified(plan, trial, executor, options, failed, group=group)
            if executor.cache.remote is not None:
                said = Claim(verification.level, verification.target, verification.versions)
                executor.cache.remote.vouch(verification.artifacts.values(), said)
    build = Build(plan, actions_of(steps), written, started, verification, executor.cache.stat)
    assembled = assemble(
        folder,
        **what,
        provenance=build.statement,
        copy=options.copy,
        keeper=executor.cache,
        digests=executor.cache.stat,
    )
    if assembled.mended:
        executor.listener.note(f"{plan.pipeline.name}: {folder} was reassembled: {assembled.mended}")
    if not assembled.pinned:
        executor.listener.note(
            f"{plan.pipeline.name}: the cache is read-only, so its owner's `cache gc` may remove what {folder} "
            "links to; --copy makes a self-contained folder"
        )
    result = PipelineResult(plan, folder, steps, time.perf_counter() - begun, verification)
    executor.listener.note(
        f"{plan.pipeline.name}: done in {result.seconds:.1f} s, {result.ran} of {sum(map(len, steps.values()))} steps ran"
    )
    return result


def _evaluate(pipeline: PipelineResult, executor: Executor, options: RunOptions) -> PipelineResult:
    planned = pipeline.plan.pipeline
    spec = planned.evaluate
    if not options.evaluate or (spec.latency is None and spec.image is None):
        return pipeline
    if absent := missing(*DRAWS):
        executor.listener.note(
            f"{planned.name}: not measured: {', '.join(absent)} {'are' if len(absent) > 1 else 'is'} not installed "
            f"({how_to_install(*absent)})"
        )
        return pipeline
    evaluation = evaluate(
        pipeline.folder,
        spec,
        planned.target,
        name=planned.name,
        results=options.results,
        required=options.require_target,
        progress=lambda phrase: executor.listener.doing(f"{planned.name} measure", phrase),
    )
    executor.listener.doing(f"{planned.name} measure", "")
    evaluation.raise_for_failure()
    pipeline = replace(pipeline, evaluation=evaluation)
    verification = pipeline.verification
    if verification is None or verification.cached or not evaluation.measured or planned.target == "cpu":
        return pipeline  # the CPU has already run it
    failed = (
        "The pipeline was assembled and measured. It is correct on the CPU, but this device gives different results."
    )
    on_device = _verified(pipeline.plan, pipeline.folder, executor, options, failed, run_on=planned.target)
    return replace(pipeline, verification=on_device)


def _verified(
    plan: PipelinePlan, folder: Path, executor: Executor, options: RunOptions, failed: str, **how: Any
) -> Verification:
    """Verify an assembled folder; the report goes to the results. Raises VerificationError if it fails.

    failed: the consequence, for the message. how: further arguments of `verify`.
    """
    name, spec = plan.pipeline.name, plan.pipeline.verify
    assert spec is not None, "it is to be verified"
    executor.listener.doing(f"{name} verify", "starting")
    verified = verify(
        _subject(plan, folder),
        spec,
        executor.cache,
        progress=lambda phrase: executor.listener.doing(f"{name} verify", phrase),
        **how,
    )
    executor.listener.doing(f"{name} verify", "")
    report = write_reports(verified, options.results)
    if not verified.result.passed:
        raise VerificationError(verified.result.failure(), where=name, remedy=f"{failed} Report: {report}.")
    return verified.result


def _subject(plan: PipelinePlan, folder: Path) -> Subject:
    pipeline = plan.pipeline
    assert plan.checkpoint is not None, "planned with download=True"
    return Subject(
        pipeline.name,
        pipeline.target,
        folder,
        plan.checkpoint,
        plan.loras,
        image=pipeline.evaluate.image or own_image(pipeline.model),
        allow_fallback=pipeline.evaluate.allow_fallback,
        refiner=None if plan.refiner is None else _subject(plan.refiner, folder / REFINER),
    )


@contextmanager
def _alone(group: WorkerGroup) -> Iterator[None]:
    """Run one verification at a time. Raises GroupEndedError if the group ends meanwhile."""
    while not _ONE_AT_A_TIME.acquire(timeout=0.2):
        group.check()
    try:
        group.check()
        yield
    finally:
        _ONE_AT_A_TIME.release()
