"""The main job: execute a workflow's plan, assemble its pipelines, evaluate them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow import __version__
from sdflow.assemble import assemble
from sdflow.config.workflow import Workflow
from sdflow.evaluate import Evaluation, evaluate
from sdflow.execute import Executor, FinishedStep, Listener
from sdflow.plan import PipelinePlan, make_plan
from sdflow.store import Cache


@dataclass(frozen=True)
class RunOptions:
    """What `sdflow run` was asked to do. Paths: folders for pipelines and for measurements."""

    out: Path
    results: Path
    copy: bool = False
    rebuild: bool = False
    check: bool = False
    evaluate: bool = True
    require_target: bool = False
    keep_failed: bool = False


@dataclass(frozen=True)
class PipelineResult:
    """A built pipeline: its folder, the steps of each submodel, and what was measured."""

    plan: PipelinePlan
    folder: Path
    steps: Mapping[str, tuple[FinishedStep, ...]]
    evaluation: Evaluation | None


@dataclass(frozen=True)
class RunResult:
    """Everything one run did, and the seconds it took."""

    pipelines: tuple[PipelineResult, ...]
    seconds: float


def run_workflow(workflow: Workflow, cache: Cache, options: RunOptions, listener: Listener) -> RunResult:
    """Build, assemble and evaluate every pipeline of a workflow.

    Raises SdflowError of the kind that says what failed; pipelines finished before stay finished.
    """
    started = time.perf_counter()
    plan = make_plan(workflow, cache, download=True)
    executor = Executor(cache, listener, rebuild=options.rebuild, check=options.check, keep_failed=options.keep_failed)
    with cache.lease() as lease:
        executor.lease = lease
        finished = [_run_pipeline(pipeline, executor, options) for pipeline in plan.pipelines]
    return RunResult(tuple(finished), time.perf_counter() - started)


def manifest(plan: PipelinePlan, steps: Mapping[str, tuple[FinishedStep, ...]]) -> dict[str, Any]:
    """The content of a pipeline's `sdflow.json`: where every file came from, and what was measured on it."""
    return {
        "sdflow": __version__,
        "pipeline": plan.pipeline.name,
        "target": plan.pipeline.target,
        "model": plan.pipeline.model,
        "checkpoint": plan.checkpoint.provenance if plan.checkpoint else None,
        "loras": [{"reference": lora.reference, "sha256": lora.sha256, "scale": lora.scale} for lora in plan.loras],
        "submodels": {
            submodel: {
                "digest": chain[-1].record.artifact.digest,
                "bytes": chain[-1].record.artifact.bytes,
                "steps": [
                    {
                        "pass": result.step.name,
                        "action": result.record.action.digest,
                        "uses": result.step.uses,
                        "config": result.step.config,
                        "facts": result.record.facts,
                        "built": result.record.built,
                    }
                    for result in chain
                ],
            }
            for submodel, chain in steps.items()
        },
    }
