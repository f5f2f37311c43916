"""The steps of one submodel, and whether they carry its weights.

Where a chain's passes only move weights, they run without any: the first step's key holds the architecture in place of
the checkpoint, so that all checkpoints and LoRAs share the graph, and BindWeights, the last step, fills it. Other
chains carry their weights through every pass, and the plan's notes say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdflow import sources
from sdflow.build.imported import as_imported
from sdflow.build.step import LoraFile, Step
from sdflow.config.workflow import PipelineSpec, StepSpec
from sdflow.disk.file_stamp import file_stamp
from sdflow.machine.packages import found_version, missing
from sdflow.passes import registry
from sdflow.passes.chain import ChainStep, why_weights_are_carried
from sdflow.passes.user_pass import is_user_pass, user_script_files
from sdflow.store import Cache
from sdflow.weights.structure import NEEDS

BIND_PASS = "BindWeights"


@dataclass(frozen=True)
class Chain:
    """The steps of one submodel. `ready`: its checkpoint and its LoRAs are on this machine.

    carried: the same passes with the weights carried, for when one looks at a weight; empty if `steps` carry them.
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
