"""Output of `sdflow plan`, `sdflow explain` and `sdflow run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import UsageError
from sdflow.report.around_run import elsewhere
from sdflow.report.output import print_json, print_table, put
from sdflow.report.verify import print_verification
from sdflow.store.remote.up import FROM
from sdflow.units import spell_bytes, spell_milliseconds, spell_seconds

if TYPE_CHECKING:
    from sdflow.bench.latency import Latency
    from sdflow.build.plan import Plan
    from sdflow.build.planned_step import PlannedStep
    from sdflow.errors import Problem
    from sdflow.run.run import PipelineResult, RunResult
    from sdflow.store import Cache

MAKES = {"symbolic": "graph", "bound": "weights", "carried": "both"}
"""What a step makes, by what it does with the weights."""

FEW = 3
"""Of more pipelines than these only a line each is printed; `--json` has everything."""

SHAPES_TOLD = 6
"""Of a submodel's inputs so many shapes are printed; `--json` has all."""

# Fused operators worth a column, in the order they are shown.
FUSED = (
    "Attention", "MultiHeadAttention", "LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization", "GroupNorm", "SkipGroupNorm", "NhwcConv",
    "BiasSplitGelu", "BiasAdd", "QuickGelu", "FastGelu", "BiasGelu", "Gelu",
)  # fmt: skip


def print_validation(valid: Mapping[str, Sequence[str]], problems: Sequence[Problem], *, as_json: bool) -> None:
    """The workflows that are valid, each with its pipelines; as JSON, also what is wrong with the others."""
    if as_json:
        print_json(
            "validation",
            {
                "valid": [{"workflow": path, "pipelines": list(names)} for path, names in valid.items()],
                "problems": [asdict(problem) for problem in sorted(set(problems))],
            },
        )
        return
    for path, names in valid.items():
        put(f"{path}: valid ({', '.join(names)})")


def print_plan(plans: Sequence[Plan], cache: Cache, *, as_json: bool) -> None:
    """Every step as cached or to run, with the reason."""
    planned = [(pipeline, list(pipeline.steps(cache))) for plan in plans for pipeline in plan.every]
    if as_json:
        listed = [_planned_json(step) for _, steps in planned for step in steps]
        print_json("plan", {"steps": listed, "notes": [note for pipeline, _ in planned for note in pipeline.notes]})
        return
    for pipeline, steps in planned:
        print_table(
            f"{pipeline.pipeline.name}: {pipeline.pipeline.model} for {pipeline.pipeline.target}",
            ("submodel", "pass", "makes", "state", "reason"),
            [
                (step.step.submodel, step.step.name, MAKES[step.step.weights], step.state, "; ".join(step.reasons))
                for step in steps
            ],
        )
        for note in pipeline.notes:
            put(f"  {note}")
    every = [step for _, steps in planned for step in steps]
    if any(step.step.weights == "symbolic" for step in every):
        put(
            "graph: built without weights, once for all checkpoints and LoRAs of an architecture; "
            "weights: written into that graph"
        )
    remote = sum(step.state == "remote" for step in every)
    elsewhere = f", {remote} come from {cache.remote.spec.shown}" if cache.remote is not None and remote else ""
    put(f"{sum(step.state == 'cached' for step in every)} of {len(every)} steps are cached{elsewhere}")


def _planned_json(planned: PlannedStep) -> dict[str, Any]:
    return {
        "step": planned.step.id,
        "pass": planned.step.name,
        "makes": MAKES[planned.step.weights],
        "state": planned.state,
        "reasons": list(planned.reasons),
        "failure": None if planned.failure is None else {"at": planned.failure.at, "error": planned.failure.error},
        "action": planned.action.digest if planned.action else None,
        "artifact": planned.record.artifact.digest if planned.record else None,
    }


def print_explanation(plans: Sequence[Plan], cache: Cache, *, only: str | None, as_json: bool) -> None:
    """What changed in each step since its last build."""
    chosen = [
        step
        for plan in plans
        for pipeline in plan.every
        for step in pipeline.steps(cache)
        if only is None or only in f"{step.step.id} {step.step.name}"
    ]
    if only is not None and not chosen:
        raise UsageError(f"no step's name contains {only!r}", where="--step", remedy="See `sdflow plan` for the steps.")
    if as_json:
        print_json("explanation", {"steps": [_planned_json(step) for step in chosen]})
        return
    claims = _claims(chosen, cache)
    for step in chosen:
        built = f"built {step.record.built['finished']}" if step.record else ""
        lines = [f"unchanged, {built}"] if step.state == "cached" else list(step.reasons)
        if (failure := step.failure) is not None:
            failed = f"{lines[0]}; failed {failure.at}" if step.state == "cached" else f"failed {failure.at}"
            lines = [failed, *failure.error.splitlines(), *lines[1:]]
        put(f"{step.step.id} {step.step.name} ({MAKES[step.step.weights]}): {lines[0] if lines else ''}")
        for line in (*lines[1:], *claims.get(step.step.id, ())):
            put(f"  {line}")


def _claims(steps: Sequence[PlannedStep], cache: Cache) -> dict[str, list[str]]:
    """Of steps that came or will come from the remote cache: who says to have verified them."""
    if cache.remote is None:
        return {}
    objects = {}
    for step in steps:
        if step.record is not None and FROM in step.record.built:
            objects[step.step.id] = step.record.artifact.digest
        elif step.state == "remote" and step.action is not None and (entry := cache.remote.look(step.action)):
            objects[step.step.id] = entry.object
    found = cache.remote.claims(objects.values()) if objects else {}
    return {name: [said.words for said in found.get(digest, ())] for name, digest in objects.items()}


def print_run(result: RunResult, *, as_json: bool, again: str = "sdflow run WORKFLOW") -> None:
    """What was built, what came from the cache, how fast it runs. again: the command that did it."""
    if as_json:
        print_json(
            "run",
            {"seconds": round(result.seconds, 3), "pipelines": [_pipeline_json(each) for each in result.pipelines]},
        )
        return
    for pipeline in result.pipelines:
        if len(result.pipelines) <= FEW:
            _print_steps(pipeline)
        if pipeline.verification is not None:
            print_verification(pipeline.verification)
        _print_evaluation(pipeline, again)
        if len(result.pipelines) <= FEW or pipeline.evaluation is not None:
            put(f"pipeline: {pipeline.folder}", "")
    if len(result.pipelines) > 1:
        _print_pipelines(result.pipelines)
    every = [step for pipeline in result.pipelines for chain in pipeline.steps.values() for step in chain]
    ran = sum(step.ran for step in every)
    put(f"{ran} of {len(every)} steps ran, the others came from the cache; {spell_seconds(result.seconds)} in all")


def _print_pipelines(pipelines: Sequence[PipelineResult]) -> None:
    """A line for each pipeline."""
    rows = []
    for each in pipelines:
        planned = each.plan.pipeline
        loras = " + ".join(f"{Path(lora.weight_name or lora.reference).name} {lora.scale:g}" for lora in planned.loras)
        artifacts = {chain[-1].record.artifact.digest: chain[-1].record.artifact for chain in each.steps.values()}
        size = sum(artifact.bytes for artifact in artifacts.values())
        rows.append(
            (planned.name, planned.target, loras, str(each.ran), spell_seconds(each.seconds), spell_bytes(size))
        )
    columns = ("pipeline", "target", "LoRAs", "steps run", "time", "size")
    print_table("", columns, rows, right=columns[3:])


def print_bake(result: PipelineResult, *, as_json: bool) -> None:
    """A line for each submodel: whether it was built, its time, how many weights the LoRAs changed."""
    if as_json:
        print_json("bake", {"pipeline": _pipeline_json(result)})
        return
    for submodel, chain in result.steps.items():
        ran = [step for step in chain if step.ran]
        last = chain[-1].record
        took = (
            f"built in {spell_seconds(sum(step.record.built['seconds'] for step in ran))}" if ran else "from the cache"
        )
        touched = next((step.record.facts["touched"] for step in chain if "touched" in step.record.facts), 0)
        put(f"{submodel:15} {took}, LoRAs in {touched} weights, {spell_bytes(last.artifact.bytes)}")
    for note in result.plan.every_note:
        put(f"  {note}")
    if result.verification is not None:
        print_verification(result.verification)
    put(f"pipeline: {result.folder}")


def _print_steps(pipeline: PipelineResult) -> None:
    rows = []
    for submodel, chain in pipeline.steps.items():
        for step in chain:
            built, facts = step.record.built, step.record.facts
            rows.append(
                (
                    submodel,
                    step.step.name,
                    step.outcome,
                    spell_seconds(built["seconds"]),
                    spell_bytes(built["peak_memory"]),
                    str(facts.get("nodes", "")),
                    fused_operators(facts.get("operators", {})),
                    spell_bytes(step.record.artifact.bytes),
                )
            )
    planned = pipeline.plan.pipeline
    print_table(
        f"{planned.name}: {planned.model} for {planned.target}",
        ("submodel", "pass", "", "time", "memory", "nodes", "fused operators", "size"),
        rows,
        right=("time", "memory", "nodes", "size"),
        below=("fused operators", "nodes"),
    )
    for note in pipeline.plan.every_note:
        put(f"  {note}")


def _print_evaluation(pipeline: PipelineResult, again: str) -> None:
    result = pipeline.evaluation
    if result is None:
        return
    if not result.measured:
        put(f"not measured: {result.reason}")
        put(*elsewhere(pipeline, again), wrap=False)  # commands are to be copied
        return
    timed = {name: (part.inputs, part.latency) for name, part in result.submodels.items()}
    rows = [
        (name, _shortened(list(inputs.values())), *_latency_cells(latency))
        for name, (inputs, latency) in timed.items()
        if latency is not None
    ]
    if result.pipeline is not None:
        settings = result.settings
        size = f"{settings['height']}x{settings['width']}, {settings['steps']} steps"
        rows.append(("whole image", size, *_latency_cells(result.pipeline)))
    if rows:
        columns = ("latency", "shapes", "runs", "first", "median", "p90", "p99", "min")
        print_table(f"on {result.provider}", columns, rows, right=columns[2:], below=("shapes", "runs"))
    for name, part in result.submodels.items():
        if part.placement.fallen:
            put(f"  {name}: {len(part.placement.fallen)} nodes run on another provider (allowed by the workflow)")
    own = [
        f"{part.placement.own_kernels} nodes of {name}"
        for name, part in result.submodels.items()
        if part.placement.own_kernels
    ]
    if own:
        put(f"  in sdflow's own kernels: {', '.join(own)}")
    for note in result.notes:
        put(f"  {note}")
    put(f"peak memory of the process: {spell_bytes(result.peak_memory_bytes or 0)}")
    if result.image:
        put(f"image: {result.image}")


def _latency_cells(latency: Latency) -> tuple[str, ...]:
    times = (latency.first_ms, latency.median_ms, latency.p90_ms, latency.p99_ms, latency.min_ms)
    return (str(latency.runs), *(spell_milliseconds(each) for each in times))


def _pipeline_json(pipeline: PipelineResult) -> dict[str, Any]:
    return {
        "name": pipeline.plan.pipeline.name,
        "target": pipeline.plan.pipeline.target,
        "folder": str(pipeline.folder),
        "seconds": round(pipeline.seconds, 3),
        "notes": list(pipeline.plan.every_note),
        "steps": [
            {
                "step": step.step.id,
                "pass": step.step.name,
                "outcome": step.outcome,
                "action": step.record.action.digest,
                "artifact": step.record.artifact.digest,
                "bytes": step.record.artifact.bytes,
                "built": step.record.built,
                "facts": step.record.facts,
            }
            for chain in pipeline.steps.values()
            for step in chain
        ],
        "verification": pipeline.verification.to_json() if pipeline.verification else None,
        "evaluation": pipeline.evaluation.to_json() if pipeline.evaluation else None,
    }


def fused_operators(operators: Mapping[str, int]) -> str:
    """ "MultiHeadAttention 32, GroupNorm 16": the fused operators that a graph has."""
    return ", ".join(f"{name} {operators[name]}" for name in FUSED if operators.get(name))


def _shortened(shapes: Sequence[str]) -> str:
    """The first shapes; a UNet beside ControlNets has more of them than a line holds."""
    rest = len(shapes) - SHAPES_TOLD
    return ", ".join(shapes[:SHAPES_TOLD]) + (f" and {rest} more" if rest > 0 else "")
