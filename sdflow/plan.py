"""Workflow to Plan: for every step of every chain its action (the cache key), whether it is cached, and why not.

Planning reads the workflow, the checkpoint's and the LoRAs' digests (cached by file stat) and the cache's index. It
imports neither torch nor onnx nor olive, and nothing leaves the machine.

A step's key holds the digest of its *input's content*. So the key of a step is known only once the step before has been
built; until then the plan says so. It also means that a step which gives the same bytes as last time ends the rebuild
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from sdflow import sources
from sdflow.artifact import Action, Record
from sdflow.config.workflow import LoraSpec, Pipeline, StepSpec, Workflow
from sdflow.errors import CheckpointError, UsageError
from sdflow.passes import registry
from sdflow.passes.base import Pass
from sdflow.passes.user_pass import is_user_pass, user_script_files
from sdflow.store import Cache, explain
from sdflow.targets import ONNXRUNTIME_FLAVOURS

ACTION_FORMAT = 1


@dataclass(frozen=True)
class LoraFile:
    """A LoRA on disk: the digest of its content, its scale, and how the workflow calls it."""

    reference: str
    path: Path
    sha256: str
    scale: float


@dataclass(frozen=True)
class Step:
    """One step of one pipeline. `id` is stable between runs: `explain` compares the step with its last build by it."""

    pipeline: str
    submodel: str
    index: int
    spec: StepSpec
    implementation: type[Pass[Any]]
    config: Mapping[str, Any]
    uses: Mapping[str, str]
    user_scripts: tuple[str, ...]
    loras: tuple[LoraFile, ...]

    @property
    def id(self) -> str:
        return f"{self.pipeline}/{self.submodel}/{self.index}"

    @property
    def base(self) -> Path:
        """The folder that a pass given by path is looked up from."""
        return self.spec.base

    @property
    def name(self) -> str:
        return self.spec.pass_name

    def action(self, model: str | Mapping[str, Any], salt: str) -> Action:
        """The step's action, given its input: a tree digest, or the identity of a checkpoint's submodel."""
        return Action(
            {
                "format": ACTION_FORMAT,
                "pass": {"name": self.implementation.name, "version": self.implementation.version},
                "submodel": self.submodel,
                "config": self.config,
                "inputs": {
                    "model": model,
                    "loras": [{"sha256": lora.sha256, "scale": lora.scale} for lora in self.loras],
                },
                "uses": self.uses,
                "user_scripts": list(self.user_scripts),
                "salt": salt,
            }
        )


@dataclass(frozen=True)
class PlannedStep:
    """A step with what is known of it now. `action` is None while its input has yet to be built."""

    step: Step
    state: Literal["cached", "to run"]
    action: Action | None
    record: Record | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """The steps of one submodel. `source` is None while the checkpoint is not on this machine."""

    submodel: str
    source: sources.SubmodelCheckpoint | None
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class PipelinePlan:
    """One pipeline: its chains, where its checkpoint comes from, and what was left out and why."""

    pipeline: Pipeline
    checkpoint: sources.Checkpoint | None
    loras: tuple[LoraFile, ...]
    chains: tuple[Chain, ...]
    notes: tuple[str, ...]

    def steps(self, cache: Cache) -> Iterator[PlannedStep]:
        """Each step as cached or to run, looked up in `cache` now."""
        for chain in self.chains:
            yield from _look_up(chain, cache)


@dataclass(frozen=True)
class Plan:
    """Everything a workflow asks for, in order."""

    workflow: Workflow
    pipelines: tuple[PipelinePlan, ...]


def make_plan(workflow: Workflow, cache: Cache, *, download: bool = False) -> Plan:
    """Plan a workflow against a cache.

    download: fetch hub checkpoints and LoRAs that are not on this machine yet. Without it they are planned as
        "to run: not downloaded yet".

    Raises CheckpointError for a checkpoint or LoRA that cannot be used, UsageError for a pass whose packages are not
    installed.
    """
    opened: dict[tuple[str, bool], sources.Checkpoint | None] = {}
    plans = []
    for pipeline in workflow.pipelines:
        key = (pipeline.model, pipeline.allow_pickle)
        if key not in opened:
            opened[key] = _open(pipeline, cache, download)
        plans.append(_plan_pipeline(pipeline, opened[key], cache, download))
    return Plan(workflow, tuple(plans))


@cache
def distribution_version(name: str) -> str:
    """The installed version of a distribution; "onnxruntime" is found under the name of any of its flavours."""
    for flavour in ONNXRUNTIME_FLAVOURS if name == "onnxruntime" else (name,):
        try:
            return metadata.version(flavour)
        except metadata.PackageNotFoundError:
            continue
    extra = " (the extras of sdflow: cpu, cuda, migraphx, directml)" if name == "onnxruntime" else ""
    raise UsageError(f"the package {name} is not installed", remedy=f"pip install {name}{extra}")


def _open(pipeline: Pipeline, cache: Cache, download: bool) -> sources.Checkpoint | None:
    try:
        return sources.open_checkpoint(
            pipeline.model, digests=cache.stat, download=download, allow_pickle=pipeline.allow_pickle
        )
    except sources.CheckpointNotLocal:
        if download:
            raise
        return None
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where or str(pipeline.model_mark), remedy=error.remedy) from error


def _plan_pipeline(
    pipeline: Pipeline, checkpoint: sources.Checkpoint | None, cache: Cache, download: bool
) -> PipelinePlan:
    notes = []
    loras = []
    for spec in pipeline.loras:
        lora = _open_lora(spec, cache, download)
        if lora is None:
            notes.append(f"LoRA {spec.reference} is not downloaded yet")
        else:
            loras.append(lora)
    missing_loras = len(loras) < len(pipeline.loras)
    chains = []
    for submodel, specs in pipeline.submodels.items():
        source = checkpoint.submodels.get(submodel) if checkpoint else None
        if checkpoint is not None and source is None:
            if submodel != "safety_checker":
                raise CheckpointError(
                    f"the checkpoint {pipeline.model} has no {submodel}", where=str(pipeline.model_mark)
                )
            notes.append(f"the checkpoint has no {submodel}: it is left out")
            continue
        steps = tuple(_step(pipeline, submodel, index, spec, loras, cache) for index, spec in enumerate(specs))
        if missing_loras and any(step.implementation.takes_loras for step in steps):
            source = None
        chains.append(Chain(submodel, source, steps))
    return PipelinePlan(pipeline, checkpoint, tuple(loras), tuple(chains), tuple(notes))


def _open_lora(spec: LoraSpec, cache: Cache, download: bool) -> LoraFile | None:
    try:
        path = sources.find_lora(spec.reference, spec.weight_name, download=download)
    except sources.CheckpointNotLocal:
        if download:
            raise
        return None
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where or str(spec.mark), remedy=error.remedy) from error
    return LoraFile(spec.reference, path, cache.stat.digest(path), spec.scale)


def _step(
    pipeline: Pipeline, submodel: str, index: int, spec: StepSpec, loras: Sequence[LoraFile], cache: Cache
) -> Step:
    base = spec.base
    implementation = registry.find_pass(spec.pass_name, base)
    scripts = user_script_files(spec.pass_name, base) if is_user_pass(spec.pass_name) else ()
    return Step(
        pipeline=pipeline.name,
        submodel=submodel,
        index=index,
        spec=spec,
        implementation=implementation,
        config=implementation.Config(**spec.options).model_dump(mode="json"),
        uses={name: distribution_version(name) for name in implementation.uses},
        user_scripts=tuple(sorted(cache.stat.digest(path) for path in scripts)),
        loras=tuple(loras) if implementation.takes_loras else (),
    )


def _look_up(chain: Chain, cache: Cache) -> Iterator[PlannedStep]:
    model: str | Mapping[str, Any] | None = chain.source.identity if chain.source else None
    waiting = "its checkpoint or a LoRA is not downloaded yet"
    for step in chain.steps:
        if model is None:
            yield PlannedStep(step, "to run", None, None, (waiting,))
            continue
        action = step.action(model, cache.salt)
        record = cache.lookup(action)
        if record is not None:
            yield PlannedStep(step, "cached", action, record, ())
            model = record.artifact.digest
        else:
            yield PlannedStep(step, "to run", action, None, why_not_cached(step, action, cache))
            model = None
            waiting = "its input is built by the step before"


def why_not_cached(step: Step, action: Action, cache: Cache) -> tuple[str, ...]:
    """In words: what differs from the last build of the same step."""
    last = cache.last_action(step.id)
    if last is not None and last.digest == action.digest:
        return ("its cached result is gone from the cache",)
    return explain(last, action)
