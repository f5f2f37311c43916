"""What a plan and its finished steps amount to: the content of a pipeline folder, and where every file of it came from."""

from __future__ import annotations

from dataclasses import replace

from sdflow.build.listener import FinishedStep, Steps
from sdflow.build.pipeline_folder import Content
from sdflow.build.plan import PipelinePlan
from sdflow.config.workflow import StepSpec
from sdflow.manifest import REFINER, Chain, FinishedPass, MergedLora, Origin, WrittenPass
from sdflow.passes.quantizing import quantization_of
from sdflow.passes.user_pass import is_user_pass


def of_refiner(steps: Steps) -> Steps:
    """The steps of a pipeline's refiner, by its own submodels."""
    begins = f"{REFINER}/"
    return {name.removeprefix(begins): chain for name, chain in steps.items() if name.startswith(begins)}


def content_of(plan: PipelinePlan, steps: Steps, *, verified: str | None) -> Content:
    """What goes into the folder of a pipeline whose steps are finished. verified: the level that it passed, or is held to before
    it takes its place; None: not verified."""
    assert plan.checkpoint is not None, "planned with download=True"
    return Content(
        {chain.submodel: steps[chain.submodel][-1].record.artifact for chain in plan.chains},
        plan.checkpoint.companions,
        replace(origin_of(plan, steps), verified=verified),
        plan.checkpoint.options,
        plan.checkpoint.changed_companions(),
    )


def origin_of(plan: PipelinePlan, steps: Steps) -> Origin:
    """Where every file of a pipeline came from, and what was measured on it."""
    pipeline = plan.pipeline
    loras = (
        MergedLora(lora.reference, spec.weight_name, lora.sha256, lora.scale)
        for spec, lora in zip(pipeline.loras, plan.loras, strict=True)
    )
    return Origin(
        name=pipeline.name,
        target=pipeline.target,
        model=pipeline.model,
        checkpoint=plan.checkpoint.provenance if plan.checkpoint else None,
        allow_pickle=pipeline.allow_pickle,
        carry_weights=pipeline.carry_weights,
        loras=tuple(loras),
        chains={
            submodel: Chain(
                tuple(_as_written(spec) for spec in pipeline.submodels[submodel]),
                tuple(map(_as_run, chain)),
                quantization_of([(each.step.implementation, each.step.config, each.record.facts) for each in chain]),
            )
            for submodel, chain in steps.items()
            if submodel in pipeline.submodels
        },
        components=pipeline.components,
        controlnets=pipeline.controlnets,
        ip_adapters=tuple(adapter.to_json() for adapter in pipeline.ip_adapters),
        generate=pipeline.generate,
        few_steps=plan.few_steps,
        refiner=None if pipeline.refiner is None else REFINER,
        left_out=tuple(sorted({*plan.checkpoint.submodels} - {*steps})) if plan.checkpoint else None,
        **({"family": plan.checkpoint.family.name} if plan.checkpoint else {}),
    )


def _as_written(spec: StepSpec) -> WrittenPass:
    """A step as the workflow has it, for `sdflow.run.bake`; the path of a user's pass made absolute."""
    name = str((spec.folder / spec.pass_name).absolute()) if is_user_pass(spec.pass_name) else spec.pass_name
    return WrittenPass(name, dict(spec.options))


def _as_run(result: FinishedStep) -> FinishedPass:
    step = result.step
    return FinishedPass(step.name, result.record.action.digest, step.config, step.uses, result.record.facts)
