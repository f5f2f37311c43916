"""Plan a workflow: for every step of every chain its action (the cache key), whether it is cached, and if not, why.

Planning reads the workflow, the digests of checkpoints and LoRAs (cached by file stat) and the cache's index. It
imports neither torch nor onnx nor olive, and sends nothing to the network.

A step's key holds the digest of its *input's content*, so it is known only once the previous step is built; until then
the plan says so. It also means that a rebuild stops at a step which reproduces its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sdflow import sources
from sdflow.build.chain import Chain, PlannedStep, look_up, make_chain
from sdflow.build.imported import not_here, notes_for
from sdflow.build.listener import Expected
from sdflow.build.model_check import require_buildable_model
from sdflow.build.step import LoraFile
from sdflow.config.workflow import LoraSpec, PipelineSpec, Workflow
from sdflow.disk.file_stamp import file_stamp
from sdflow.errors import CheckpointError, WorkflowError
from sdflow.families.shared.few_steps import spelled
from sdflow.families.shared.sampler_names import known_scheduler
from sdflow.machine.packages import lacks
from sdflow.manifest import REFINER
from sdflow.passes import registry
from sdflow.sources.hub import commit_of
from sdflow.store import Cache


@dataclass(frozen=True)
class PipelinePlan:
    """One pipeline: its chains, its checkpoint, and notes on what was left out. few_steps: defaults for generating that
    the names of model and LoRAs imply, and the reason, `because`. refiner: the plan of its refiner."""

    pipeline: PipelineSpec
    checkpoint: sources.Checkpoint | None
    loras: tuple[LoraFile, ...]
    chains: tuple[Chain, ...]
    notes: tuple[str, ...]
    few_steps: Mapping[str, Any] = field(default_factory=dict)
    refiner: PipelinePlan | None = None

    @property
    def together(self) -> dict[str, Chain]:
        """All its chains: submodel -> chain, with the refiner's as `refiner/SUBMODEL`."""
        own = {chain.submodel: chain for chain in self.chains}
        return own if self.refiner is None else own | {
            f"{REFINER}/{name}": chain for name, chain in self.refiner.together.items()
        }  # fmt: skip

    @property
    def targets(self) -> dict[str, str]:
        """Pipeline name -> target, including the refiner's."""
        more = self.refiner.targets if self.refiner is not None else {}
        return {self.pipeline.name: self.pipeline.target, **more}

    @property
    def every_note(self) -> tuple[str, ...]:
        """Its notes, including its refiner's."""
        more = self.refiner.notes if self.refiner is not None else ()
        return (*self.notes, *(f"{REFINER}: {note}" for note in more))

    def steps(self, cache: Cache) -> Iterator[PlannedStep]:
        """Look up each step in `cache` now."""
        for chain in self.chains:
            yield from look_up(chain, cache)


@dataclass(frozen=True)
class Plan:
    """All pipelines of a workflow, in order."""

    workflow: Workflow
    pipelines: tuple[PipelinePlan, ...]

    @property
    def every(self) -> Iterator[PipelinePlan]:
        """The pipelines, each followed by its refiner."""
        for pipeline in self.pipelines:
            yield from (pipeline,) if pipeline.refiner is None else (pipeline, pipeline.refiner)

    def steps(self, cache: Cache) -> list[PlannedStep]:
        """Look up each step of every pipeline in `cache` now."""
        return [step for pipeline in self.every for step in pipeline.steps(cache)]

    def require_buildable(self, cache: Cache, *, rebuild: bool = False) -> None:
        """Raises UsageError naming all steps to run whose packages (torch, olive-ai, ...) are not installed. rebuild:
        cached steps run, too."""
        lacking = [each for each in self.steps(cache) if each.step.lacks]
        missing = [each.step for each in lacking if rebuild or each.state == "to run"]
        if missing and rebuild:
            absent = sorted({package for step in missing for package in step.lacks})
            raise lacks(
                "rebuilding every step, including the structures,", absent, "Leave out --clean_cache and --check."
            )
        if missing:
            targets = {name: target for each in self.pipelines for name, target in each.targets.items()}
            raise not_here(missing, targets)

    def expected(self, cache: Cache, *, anew: bool = False) -> Expected:
        """The upcoming work, as far as the cache knows. anew: cached steps run, too. With a remote cache, which is not
        queried, the cached steps are unknown."""
        chains = {
            (step.pipeline, step.submodel): tuple(each.id for each in chain.steps)
            for pipeline in self.every
            for chain in pipeline.chains
            for step in chain.steps[:1]
        }
        if cache.remote is not None:
            return Expected(chains)
        planned = self.steps(cache)
        cached = frozenset(each.step.id for each in planned if each.state == "cached" and not anew)
        others = {each.step.id: each.seconds(cache) for each in planned if each.step.id not in cached}
        return Expected(chains, cached, {step: took for step, took in others.items() if took is not None})


def make_plan(workflow: Workflow, cache: Cache, *, download: bool = False) -> Plan:
    """Plan a workflow against a cache.

    download: fetch hub checkpoints and LoRAs that are missing here. Without it, their steps are planned as "to run: not
        downloaded yet".

    Raises CheckpointError for an unusable checkpoint or LoRA.
    """
    opened: dict[tuple[str, str], sources.Checkpoint | None] = {}
    loras: dict[tuple[str, str | None], LoraFile | None] = {}
    checked: set[tuple[tuple[str, str], str, str | None]] = set()

    def planned(pipeline: PipelineSpec) -> PipelinePlan:
        key = (pipeline.model, repr(pipeline.opening))
        if key not in opened:
            opened[key] = _open(pipeline, cache, download)
        for spec in pipeline.loras:
            if (spec.reference, spec.weight_name) not in loras:
                loras[spec.reference, spec.weight_name] = _open_lora(spec, cache, download)
            lora, checkpoint = loras[spec.reference, spec.weight_name], opened[key]
            pair = (key, spec.reference, spec.weight_name)
            if lora is not None and checkpoint is not None and pair not in checked:
                sources.require_made_for(lora.path, checkpoint)
                checked.add(pair)
        refiner = None if pipeline.refiner is None else planned(pipeline.refiner)
        return replace(_plan_pipeline(pipeline, opened[key], loras, cache), refiner=refiner)

    return Plan(workflow, tuple(planned(pipeline) for pipeline in workflow.pipelines))


def _open(pipeline: PipelineSpec, cache: Cache, download: bool) -> sources.Checkpoint | None:
    try:
        return sources.open_checkpoint(pipeline.model, digests=cache.stat, download=download, **pipeline.opening)
    except sources.CheckpointNotLocal:
        if download:
            raise
        return None
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where or str(pipeline.model_mark), remedy=error.remedy) from error


def _plan_pipeline(
    pipeline: PipelineSpec,
    checkpoint: sources.Checkpoint | None,
    opened: Mapping[tuple[str, str | None], LoraFile | None],
    cache: Cache,
) -> PipelinePlan:
    if checkpoint is not None:
        require_buildable_model(pipeline, checkpoint)
    notes = list(checkpoint.notes) if checkpoint is not None else []
    loras = []
    for spec in pipeline.loras:
        lora = opened[spec.reference, spec.weight_name]
        if lora is None:
            notes.append(f"LoRA {spec.reference} is not downloaded yet")
        else:
            _require_merge(lora, spec, pipeline)
            loras.append(replace(lora, scale=spec.scale))
    missing_loras = len(loras) < len(pipeline.loras)
    chains = []
    left_out = [component for component, source in pipeline.components.items() if source is None]
    carried: dict[str, list[str]] = {}
    for submodel, specs in pipeline.submodels.items():
        source = checkpoint.submodels.get(submodel) if checkpoint else None
        if checkpoint is not None and source is None:
            parts = {part.name: part.component for part in checkpoint.family.parts}
            notes.append(
                f"the workflow leaves out {submodel}"
                if parts.get(submodel) in left_out
                else f"the checkpoint has no {submodel}: it is not built"
            )
            continue
        chain, why = make_chain(pipeline, submodel, specs, source, loras, cache)
        if missing_loras and any(step.implementation.takes_loras for step in (*chain.steps, *chain.carried)):
            chain = replace(chain, ready=False)
        chains.append(chain)
        if why is not None:
            carried.setdefault(why, []).append(submodel)
    for why, submodels in carried.items():
        notes.append(f"{', '.join(submodels)}: every pass carries the weights: {why}")
    notes += notes_for({chain.submodel: chain.steps for chain in chains})
    few_steps: dict[str, Any] = {}
    if checkpoint is not None:
        merged = [
            (spec, lora) for spec in pipeline.loras if spec.scale and (lora := opened[spec.reference, spec.weight_name])
        ]
        few_steps = sources.few_steps(
            checkpoint, [(spec.reference, spec.weight_name, lora.path) for spec, lora in merged]
        )
        said = {**few_steps, **pipeline.generate}
        if "scheduler" in said:
            schedulers = checkpoint.family.noising.schedulers
            said["scheduler"] = known_scheduler(said["scheduler"], "generate.scheduler", schedulers)
        checkpoint = replace(checkpoint, said=said)
        if few_steps:
            notes.append(f"{few_steps['because']}, so the defaults are {spelled(said)}")
    return PipelinePlan(pipeline, checkpoint, tuple(loras), tuple(chains), tuple(notes), few_steps)


def _require_merge(lora: LoraFile, spec: LoraSpec, pipeline: PipelineSpec) -> None:
    """Raises WorkflowError if a chain has no step for the LoRA's tensors, which would otherwise be dropped silently."""
    for submodel in lora.submodels:
        steps = pipeline.submodels.get(submodel, ())
        if submodel in pipeline.submodels and not any(
            registry.tried_pass(step.pass_name, step.folder).takes_loras for step in steps
        ):
            problem = f"the LoRA {spec.reference} changes the {submodel}, whose chain has no step that merges LoRAs"
            remedy = f"add {{pass: LoraMerge}} after OnnxConversion in submodels.{submodel}.passes"
            raise WorkflowError([spec.mark.problem(problem, remedy)])


def _open_lora(spec: LoraSpec, cache: Cache, download: bool) -> LoraFile | None:
    try:
        path = sources.find_lora(spec.reference, spec.weight_name, download=download)
        stamp = file_stamp(path)  # before the digest, so that a change in between is found on reading
        submodels = sources.lora_submodels(path)
        digest = sources.lora_digest(path, cache.stat)
    except sources.CheckpointNotLocal:
        if download:
            raise
        return None
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where or str(spec.mark), remedy=error.remedy) from error
    commit = commit_of(path) if spec.reference.startswith("hf:") else None
    return LoraFile(spec.reference, path, digest, spec.scale, submodels, stamp, commit)
