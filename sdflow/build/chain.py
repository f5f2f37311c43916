"""The steps of one submodel, with or without its weights.

If a chain's passes only move weights, they run without any: the first step's key holds the architecture instead of the
checkpoint, so that all checkpoints and LoRAs share the graph, and the last step, BindWeights, fills it. Other chains
carry their weights through every pass, and the plan's notes say why.

`look_up` finds a step's state before anything runs: in the cache, in the remote cache, or the reason to build it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sdflow import sources
from sdflow.artifact import Action, Record
from sdflow.build.explain import explain
from sdflow.build.imported import as_imported, why_not_here
from sdflow.build.step import LoraFile, Step
from sdflow.config.workflow import PipelineSpec, StepSpec
from sdflow.disk.file_stamp import file_stamp
from sdflow.machine.packages import found_version, missing
from sdflow.passes import registry
from sdflow.passes.chain import ChainStep, why_weights_are_carried
from sdflow.passes.user_pass import is_user_pass, user_script_files
from sdflow.store import Cache, Failure
from sdflow.weights.structure import NEEDS

MOST_SHOWN = 100
"""Maximum characters of an error in a step's line."""

BIND_PASS = "BindWeights"


@dataclass(frozen=True)
class Chain:
    """The steps of one submodel. ready: whether its checkpoint and LoRAs are on this machine.

    carried: the same passes with weights, used when one reads a weight; empty if `steps` carry them already.
    """

    submodel: str
    ready: bool
    steps: tuple[Step, ...]
    carried: tuple[Step, ...] = ()


def make_chain(
    pipeline: PipelineSpec,
    submodel: str,
    specs: Sequence[StepSpec],
    source: sources.SubmodelCheckpoint | None,
    loras: Sequence[LoraFile],
    cache: Cache,
) -> tuple[Chain, str | None]:
    """Return the chain, and the reason if it carries its weights."""

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
    script_stamps = tuple(file_stamp(path) for path in scripts)  # before loading the pass and computing digests
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


@dataclass(frozen=True)
class PlannedStep:
    """A step with its current state. action: None until its input is built. "remote": available in the remote cache.
    failure: its failure since it was last built or found in the cache."""

    step: Step
    state: Literal["cached", "remote", "to run"]
    action: Action | None
    record: Record | None
    reasons: tuple[str, ...]
    failure: Failure | None = None

    def seconds(self, cache: Cache) -> float | None:
        """Seconds that the pass took when this step was last built, if that result is still cached."""
        record = self.record
        if record is None and (action := cache.notes.last_action(self.step.id)) is not None:
            record = cache.lookup(action)
        return None if record is None else float(record.built["seconds"])


def look_up(chain: Chain, cache: Cache) -> list[PlannedStep]:
    """Look up a chain's steps in the cache; the carried ones if a step without weights is known to read them."""
    planned = list(_each(chain.steps, chain.ready, cache))
    if any(each.action and each.state == "to run" and reads_weights(each.action, cache) for each in planned):
        return list(_each(chain.carried, chain.ready, cache))
    return planned


def _each(steps: Sequence[Step], ready: bool, cache: Cache) -> Iterator[PlannedStep]:
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
        failure = cache.notes.last_failure(step.id)
        if record is not None:
            yield PlannedStep(step, "cached", action, record, (), failure)
            before = record.artifact.digest
        elif cache.remote is not None and (entry := cache.remote.look(action.digest)) is not None:
            yield PlannedStep(step, "remote", action, None, (f"fetched from {cache.remote.spec.shown}",))
            before = entry.object
        else:
            reasons = (why_not_here(step),) if step.lacks else _why_not_cached(step, action, failure, cache)
            yield PlannedStep(step, "to run", action, None, reasons, failure)
            waiting = "its input is built by the step before"


def _why_not_cached(step: Step, action: Action, failure: Failure | None, cache: Cache) -> tuple[str, ...]:
    """The failure, or the differences from the step's last build or last attempt, in words."""
    if failure is not None:
        begins = next(iter(failure.error.splitlines()), "")
        failed = f"failed {failure.at}: {begins if len(begins) <= MOST_SHOWN else begins[: MOST_SHOWN - 3] + '...'}"
        return (failed, *(f"changed since: {line}" for line in explain(failure.action, action)))
    last = cache.notes.last_action(step.id)
    if last is not None and last.digest == action.digest:
        return ("its result was removed from the cache",)
    return explain(last, action)


def remember_reading(action: Action, cache: Cache) -> None:
    """Record that a pass without weights read one: the next run carries the weights from the start."""
    cache.notes.remember_step(f"reads weights/{action.digest}", action)


def reads_weights(action: Action, cache: Cache) -> bool:
    """Whether that is recorded for this action."""
    return cache.notes.last_action(f"reads weights/{action.digest}") == action
