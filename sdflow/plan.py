"""Workflow to Plan: for every step of every chain its action (the cache key), whether it is cached, and why not.

Planning reads the workflow, the checkpoint's and the LoRAs' digests (cached by file stat) and the cache's index. It
imports neither torch nor onnx nor olive, and nothing leaves the machine.

A step's key holds the digest of its *input's content*. So the key of a step is known only once the step before has been
built; until then the plan says so. It also means that a step which gives the same bytes as last time ends the rebuild
there.

Where a chain's passes only move weights, they run without any: the first step's key holds the architecture in place of
the checkpoint, so that all checkpoints and LoRAs share the graph, and BindWeights, the last step, fills it. Other
chains carry their weights through every pass, and the plan's notes say why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sdflow import sources
from sdflow.artifact import Action, Record
from sdflow.config.workflow import LoraSpec, PipelineSpec, StepSpec, Workflow
from sdflow.digest import digest_json
from sdflow.errors import CheckpointError, Problem, UsageError, WorkflowError
from sdflow.families import DRAWING, OPTIONAL
from sdflow.families.few_steps import spelled
from sdflow.file_stamp import file_stamp
from sdflow.imported import as_imported, told, why_not_here
from sdflow.machine.packages import found_version, missing
from sdflow.manifest import REFINER
from sdflow.passes import registry
from sdflow.passes.chain import ChainStep, why_weights_are_carried
from sdflow.passes.user_pass import is_user_pass, user_script_files
from sdflow.step import LoraFile, Step
from sdflow.store import Cache, explain
from sdflow.weights.structure import NEEDS

BIND_PASS = "BindWeights"


@dataclass(frozen=True)
class PlannedStep:
    """A step with what is known of it now. `action` is None while its input has yet to be built. "remote": it comes from the
    remote cache."""

    step: Step
    state: Literal["cached", "remote", "to run"]
    action: Action | None
    record: Record | None
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """The steps of one submodel. `ready`: its checkpoint and its LoRAs are on this machine.

    carried: the same passes with the weights carried, for when one looks at a weight; empty if `steps` carry them.
    """

    submodel: str
    ready: bool
    steps: tuple[Step, ...]
    carried: tuple[Step, ...] = ()


@dataclass(frozen=True)
class PipelinePlan:
    """One pipeline: its chains, where its checkpoint comes from, and what was left out and why. few_steps: what the names of
    the model and the LoRAs say of how it draws, and `because`. refiner: what is built with it."""

    pipeline: PipelineSpec
    checkpoint: sources.Checkpoint | None
    loras: tuple[LoraFile, ...]
    chains: tuple[Chain, ...]
    notes: tuple[str, ...]
    few_steps: Mapping[str, Any] = field(default_factory=dict)
    refiner: PipelinePlan | None = None

    @property
    def together(self) -> dict[str, Chain]:
        """All chains that are built for it: submodel -> chain, and `refiner/SUBMODEL`."""
        own = {chain.submodel: chain for chain in self.chains}
        return own if self.refiner is None else own | {
            f"{REFINER}/{name}": chain for name, chain in self.refiner.together.items()
        }  # fmt: skip

    @property
    def targets(self) -> dict[str, str]:
        """Pipeline -> its target: its own, and its refiner's."""
        more = self.refiner.targets if self.refiner is not None else {}
        return {self.pipeline.name: self.pipeline.target, **more}

    @property
    def every_note(self) -> tuple[str, ...]:
        """Its notes, and those of its refiner."""
        more = self.refiner.notes if self.refiner is not None else ()
        return (*self.notes, *(f"{REFINER}: {note}" for note in more))

    def steps(self, cache: Cache) -> Iterator[PlannedStep]:
        """Each step as cached or to run, looked up in `cache` now."""
        for chain in self.chains:
            planned = list(_look_up(chain.steps, chain.ready, cache))
            if any(each.action and each.state == "to run" and reads_weights(each.action, cache) for each in planned):
                planned = list(_look_up(chain.carried, chain.ready, cache))
            yield from planned


@dataclass(frozen=True)
class Plan:
    """Everything a workflow asks for, in order."""

    workflow: Workflow
    pipelines: tuple[PipelinePlan, ...]

    @property
    def every(self) -> Iterator[PipelinePlan]:
        """The pipelines, each refiner behind its base."""
        for pipeline in self.pipelines:
            yield from (pipeline,) if pipeline.refiner is None else (pipeline, pipeline.refiner)


def make_plan(workflow: Workflow, cache: Cache, *, download: bool = False) -> Plan:
    """Plan a workflow against a cache.

    download: fetch hub checkpoints and LoRAs that are not on this machine yet. Without it they are planned as
        "to run: not downloaded yet".

    Raises CheckpointError for a checkpoint or LoRA that cannot be used.
    """
    opened: dict[str, sources.Checkpoint | None] = {}
    loras: dict[tuple[str, str | None], LoraFile | None] = {}
    checked: set[tuple[str, str, str | None]] = set()

    def planned(pipeline: PipelineSpec) -> PipelinePlan:
        key = digest_json(
            [
                pipeline.model,
                pipeline.allow_pickle,
                dict(pipeline.components),
                dict(pipeline.controlnets),
                [adapter.to_json() for adapter in pipeline.ip_adapters],
            ]
        )
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
        return sources.open_checkpoint(
            pipeline.model,
            digests=cache.stat,
            download=download,
            allow_pickle=pipeline.allow_pickle,
            components=pipeline.components,
            nets=pipeline.controlnets,
            adapters=pipeline.ip_adapters,
        )
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
        _require_parts(pipeline, checkpoint)
        _require_sizes(pipeline, checkpoint)
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
    carried: dict[str, list[str]] = {}
    for submodel, specs in pipeline.submodels.items():
        source = checkpoint.submodels.get(submodel) if checkpoint else None
        if checkpoint is not None and source is None:
            if submodel not in (*OPTIONAL, *checkpoint.family.lacks):
                raise CheckpointError(
                    f"the checkpoint {pipeline.model} has no {submodel}: it is of the family {checkpoint.family.title}",
                    where=str(pipeline.model_mark),
                    remedy=f"Extend the workflow of that family: it has {', '.join(checkpoint.family.submodels)}.",
                )
            notes.append(f"the checkpoint has no {submodel}: it is left out")
            continue
        chain, why = _chain(pipeline, submodel, specs, source, loras, cache)
        if missing_loras and any(step.implementation.takes_loras for step in (*chain.steps, *chain.carried)):
            chain = replace(chain, ready=False)
        chains.append(chain)
        if why is not None:
            carried.setdefault(why, []).append(submodel)
    for why, submodels in carried.items():
        notes.append(f"{', '.join(submodels)}: the weights are carried through every pass: {why}")
    notes += told({chain.submodel: chain.steps for chain in chains})
    few_steps: dict[str, Any] = {}
    if checkpoint is not None:
        merged = [
            (spec, lora) for spec in pipeline.loras if spec.scale and (lora := opened[spec.reference, spec.weight_name])
        ]
        few_steps = sources.few_steps(
            checkpoint, [(spec.reference, spec.weight_name, lora.path) for spec, lora in merged]
        )
        said = {**few_steps, **pipeline.generate}
        checkpoint = replace(checkpoint, said=said)
        if few_steps:
            notes.append(f"{few_steps['because']}: it draws with {spelled(said)}, where nobody says otherwise")
    return PipelinePlan(pipeline, checkpoint, tuple(loras), tuple(chains), tuple(notes), few_steps)


def _chain(
    pipeline: PipelineSpec,
    submodel: str,
    specs: Sequence[StepSpec],
    source: sources.SubmodelCheckpoint | None,
    loras: Sequence[LoraFile],
    cache: Cache,
) -> tuple[Chain, str | None]:
    """The chain, and why it carries its weights, if it does."""

    def make(index: int, spec: StepSpec) -> Step:
        return _step(pipeline, submodel, index, spec, source, loras, cache)

    carried = tuple(make(index, spec) for index, spec in enumerate(specs))
    ready = source is not None
    why = why_weights_are_carried([ChainStep(step.implementation, step.config) for step in carried])
    if pipeline.carry_weights:
        why = "the workflow says carry_weights: true"
    if why is not None:
        return Chain(submodel, ready, carried), why
    kept = [step for step in carried if not step.implementation.takes_loras]
    symbolic = [_without_weights(replace(step, index=index)) for index, step in enumerate(kept)]
    if ready:
        symbolic = list(as_imported(symbolic, cache))
    last = specs[-1]
    bind = make(len(symbolic), StepSpec(BIND_PASS, options={}, expect={}, mark=last.mark, folder=last.folder))
    merges = len(kept) < len(carried)
    steps = (*symbolic, replace(bind, weights="bound", loras=bind.loras if merges else ()))
    return Chain(submodel, ready, steps, carried), None


def _without_weights(step: Step) -> Step:
    needed = missing(*step.implementation.uses, *step.implementation.needs, *NEEDS)
    return replace(step, weights="symbolic", lacks=needed)


def _require_parts(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises UsageError when the workflow draws or verifies, and has no chain for a submodel that this takes."""
    family = checkpoint.family
    configs = {name: part.load["config"] for name, part in checkpoint.submodels.items()}
    family.require_nets_fit(configs)
    missing = [name for name in family.needed(configs) if name not in pipeline.submodels]
    wanted = pipeline.evaluate.image is not None or pipeline.verify is not None
    if missing and wanted and set(DRAWING) <= set(pipeline.submodels):
        raise UsageError(
            f"no image can be drawn without {' and '.join(missing)}: {pipeline.model} is of the family {family.title}",
            where=pipeline.name,
            remedy="Extend the workflow of that family, or write `evaluate: {image: null}` and `verify: false`.",
        )


def _require_sizes(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises UsageError for a size of an image that the model's graphs cannot have."""
    multiple = checkpoint.facts.get("granularity", 1)  # a checkpoint of a few submodels has no facts, and draws nothing
    for key, spec in (("evaluate.image", pipeline.evaluate.image), ("verify", pipeline.verify)):
        for name in ("height", "width"):
            pixels = getattr(spec, name, None)
            if pixels is not None and pixels % multiple:
                raise UsageError(
                    f"{key}.{name} is {pixels} pixels",
                    where=pipeline.name,
                    remedy=f"Take a multiple of {multiple}: the graphs of {pipeline.model} halve it again and again.",
                )


def _require_merge(lora: LoraFile, spec: LoraSpec, pipeline: PipelineSpec) -> None:
    """A LoRA's tensors must not be left out in silence because a chain has no step for them."""
    for submodel in lora.submodels:
        steps = pipeline.submodels.get(submodel, ())
        if submodel in pipeline.submodels and not any(
            registry.tried_pass(step.pass_name, step.folder).takes_loras for step in steps
        ):
            mark = spec.mark
            problem = f"the LoRA {spec.reference} changes the {submodel}, whose chain has no step that merges LoRAs"
            remedy = f"add {{pass: LoraMerge}} behind OnnxConversion in submodels.{submodel}.passes"
            raise WorkflowError([Problem(mark.file, mark.line, mark.column, problem, remedy)])


def _open_lora(spec: LoraSpec, cache: Cache, download: bool) -> LoraFile | None:
    try:
        path = sources.find_lora(spec.reference, spec.weight_name, download=download)
        stamp = file_stamp(path)  # before the digest: a file that changes in between is then refused when it is read
        submodels = sources.lora_submodels(path)
        digest = sources.lora_digest(path, cache.stat)
    except sources.CheckpointNotLocal:
        if download:
            raise
        return None
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where or str(spec.mark), remedy=error.remedy) from error
    return LoraFile(spec.reference, path, digest, spec.scale, submodels, stamp)


def _step(
    pipeline: PipelineSpec,
    submodel: str,
    index: int,
    spec: StepSpec,
    source: sources.SubmodelCheckpoint | None,
    loras: Sequence[LoraFile],
    cache: Cache,
) -> Step:
    scripts = user_script_files(spec.pass_name, spec.folder) if is_user_pass(spec.pass_name) else ()
    script_stamps = tuple(file_stamp(path) for path in scripts)  # before the pass is loaded and the digests are taken
    implementation = registry.tried_pass(spec.pass_name, spec.folder)
    return Step(
        pipeline=pipeline.name,
        submodel=submodel,
        index=index,
        spec=spec,
        implementation=implementation,
        config=implementation.Config(**spec.options).model_dump(mode="json"),
        uses={name: version for name in implementation.uses if (version := found_version(name)) is not None},
        user_scripts=tuple(sorted(cache.stat.digest(path) for path in scripts)),
        loras=tuple(lora for lora in loras if implementation.takes_loras and submodel in lora.submodels),
        source=source,
        script_stamps=script_stamps,
        lacks=missing(*implementation.uses, *implementation.needs),
    )


def remember_reading(action: Action, cache: Cache) -> None:
    """Note that a pass that ran without weights looked at one: the next run goes on with the weights at once."""
    cache.remember_step(f"reads weights/{action.digest}", action)


def reads_weights(action: Action, cache: Cache) -> bool:
    """Whether that is noted of this action."""
    return cache.last_action(f"reads weights/{action.digest}") == action


def _look_up(steps: Sequence[Step], ready: bool, cache: Cache) -> Iterator[PlannedStep]:
    before: str | None = None
    waiting = None if ready else "its checkpoint or a LoRA is not downloaded yet"
    for step in steps:
        if waiting is not None:
            yield PlannedStep(step, "to run", None, None, (waiting,))
            continue
        if not step.has_key:
            yield PlannedStep(step, "to run", None, None, (why_not_here(step),))
            waiting = "its input is not here"
            continue
        action = step.action(before, cache.salt)
        record = cache.lookup(action)
        if record is not None:
            yield PlannedStep(step, "cached", action, record, ())
            before = record.artifact.digest
        elif cache.remote is not None and (entry := cache.remote.look(action)) is not None:
            yield PlannedStep(step, "remote", action, None, (f"fetched from {cache.remote.spec.shown}",))
            before = entry.object
        else:
            reasons = (why_not_here(step),) if step.lacks else why_not_cached(step, action, cache)
            yield PlannedStep(step, "to run", action, None, reasons)
            waiting = "its input is built by the step before"


def why_not_cached(step: Step, action: Action, cache: Cache) -> tuple[str, ...]:
    """In words: what differs from the last build of the same step."""
    last = cache.last_action(step.id)
    if last is not None and last.digest == action.digest:
        return ("its cached result is gone from the cache",)
    return explain(last, action)
