"""Output of `sdflow run` and `sdflow bake`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.bench.latency import Latency
from sdflow.build.listener import FinishedStep
from sdflow.build.plan import Plan
from sdflow.manifest import read_manifest
from sdflow.report.output import print_json, print_table, put
from sdflow.report.verify import print_verification
from sdflow.run.options import RunOptions
from sdflow.run.run import PipelineResult, RunResult
from sdflow.store import Cache
from sdflow.targets import TARGETS
from sdflow.units import spell_bytes, spell_milliseconds, spell_seconds

FEW = 3
"""With more pipelines, each gets only a line; `--json` has everything."""

SHAPES_TOLD = 6
"""Maximum number of a submodel's input shapes to print; `--json` has all."""

_MACHINES = {"win32": "a Windows machine", "linux": "a Linux machine", "darwin": "a Mac"}

# Fused operators worth a column, in the order they are shown.
FUSED = (
    "Attention", "MultiHeadAttention", "LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization", "GroupNorm", "SkipGroupNorm", "NhwcConv",
    "BiasSplitGelu", "BiasAdd", "QuickGelu", "FastGelu", "BiasGelu", "Gelu",
)  # fmt: skip


def to_build(plan: Plan, cache: Cache, options: RunOptions) -> str:
    """The number of steps to build, and what follows: "11 of 11 steps to build, then measurement". "" if every
    step is cached, which progress reports itself, and nothing follows."""
    steps = [step for pipeline in plan.every for step in pipeline.steps(cache)]
    again = options.rebuild or options.check
    building = len(steps) if again else sum(step.state == "to run" for step in steps)
    fetching = 0 if again else sum(step.state == "remote" for step in steps)
    said = [f"{building} of {len(steps)} steps to build"] if building or fetching else []
    if fetching:
        said[0] += f", {fetching} to fetch from the remote cache"
    specs = [pipeline.pipeline for pipeline in plan.pipelines]
    verified = options.verify and any(each.verify is not None for each in specs)
    measured = options.evaluate and any(each.evaluate.latency or each.evaluate.image for each in specs)
    if follows := [name for name, wanted in (("verification", verified), ("measurement", measured)) if wanted]:
        without = " (skip the measurement with --no-evaluate)" if measured and not building else ""
        said.append(f"then {' and '.join(follows)}{without}")
    return ", ".join(said)


def print_run(
    result: RunResult,
    pages: Mapping[str, Path],
    *,
    as_json: bool,
    again: str = "sdflow run WORKFLOW",
    quiet: bool = False,
    verbose: bool = False,
) -> None:
    """The steps built and cached, and the speed. pages: the report of each pipeline, by its name. again: the command
    that ran. quiet: only the pipelines' folders. verbose: every step and output."""
    if as_json:
        print_json(
            "run",
            {"seconds": round(result.seconds, 3), "pipelines": [_pipeline_json(each) for each in result.pipelines]},
        )
        return
    if quiet:
        put(*(pipeline.folder for pipeline in result.pipelines), wrap=False)
        return
    for pipeline in result.pipelines:
        if len(result.pipelines) <= FEW:
            _print_steps(pipeline, verbose=verbose)
        if pipeline.verification is not None:
            print_verification(pipeline.verification, verbose=verbose)
        _print_evaluation(pipeline, again, verbose=verbose)
        if len(result.pipelines) <= FEW or pipeline.evaluation is not None:
            put(f"pipeline: {pipeline.folder}")
            if page := pages.get(pipeline.plan.pipeline.name):
                put(f"report: {page}")
            put("")
    if len(result.pipelines) > 1:
        _print_pipelines(result.pipelines)
    every = [step for pipeline in result.pipelines for chain in pipeline.steps.values() for step in chain]
    ran = sum(step.ran for step in every)
    steps = f"{ran} of {len(every)} steps ran"
    if ran < len(every):
        steps = f"{steps}; the others were cached" if ran else f"no step ran: all {len(every)} were cached"
    put(f"{steps}; {spell_seconds(result.seconds)} in all")


def _print_pipelines(pipelines: Sequence[PipelineResult]) -> None:
    """A line per pipeline."""
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


def print_bake(result: PipelineResult, *, as_json: bool, quiet: bool = False, verbose: bool = False) -> None:
    """A line per submodel: whether it was built, its time, and how many weights the LoRAs changed."""
    if as_json:
        print_json("bake", {"pipeline": _pipeline_json(result)})
        return
    if quiet:
        put(result.folder, wrap=False)
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
        print_verification(result.verification, verbose=verbose)
    put(f"pipeline: {result.folder}")


def _print_steps(pipeline: PipelineResult, *, verbose: bool) -> None:
    """A row per submodel. verbose: per step."""
    planned = pipeline.plan.pipeline
    title = f"{planned.name}: {planned.model} for {planned.target}"
    if verbose:
        _print_each_step(pipeline, title)
    else:
        columns = ("submodel", "steps", "time", "memory", "nodes", "size")
        rows = [(submodel, *of_chain(chain)) for submodel, chain in pipeline.steps.items()]
        print_table(title, columns, rows, right=columns[2:])
    for note in pipeline.plan.every_note:
        put(f"  {note}")


def of_chain(chain: Sequence[FinishedStep]) -> tuple[str, ...]:
    """The numbers of steps by outcome; time and memory of those that ran; the last one's output."""
    outcomes = [step.outcome for step in chain]
    ran, last = [step.record.built for step in chain if step.ran], chain[-1].record
    return (
        ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes)),
        spell_seconds(sum(each["seconds"] for each in ran)) if ran else "",
        spell_bytes(max(each["peak_memory"] for each in ran)) if ran else "",
        str(last.facts.get("nodes", "")),
        spell_bytes(last.artifact.bytes),
    )


def _print_each_step(pipeline: PipelineResult, title: str) -> None:
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
    print_table(
        title,
        ("submodel", "pass", "", "time", "memory", "nodes", "fused operators", "size"),
        rows,
        right=("time", "memory", "nodes", "size"),
        below=("fused operators", "nodes"),
    )


def _print_evaluation(pipeline: PipelineResult, again: str, *, verbose: bool) -> None:
    result = pipeline.evaluation
    if result is None:
        return
    if not result.measured:
        put(f"not measured: {result.reason}")
        put(*_elsewhere(pipeline, again), wrap=False)  # commands should be copyable
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
        shown = [index for index, name in enumerate(columns) if verbose or name not in ("shapes", "min")]
        print_table(
            f"on {result.provider}",
            [columns[index] for index in shown],
            [[row[index] for index in shown] for row in rows],
            right=columns[2:],
            below=("shapes", "runs"),
        )
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


def _elsewhere(pipeline: PipelineResult, again: str) -> list[str]:
    """How to run a pipeline whose target is not available here. again: the command that built it."""
    assert pipeline.evaluation is not None, "it was to be measured"
    target, folder, remedy = TARGETS[pipeline.plan.pipeline.target], pipeline.folder, pipeline.evaluation.remedy
    impossible = target.platform is not None and sys.platform != target.platform
    machine = _MACHINES[target.platform] if target.platform is not None else f"a machine with {target.title}"
    lines = [] if impossible or remedy is None else [f"  To measure it here: {remedy}"]
    if not read_manifest(folder).copied:
        lines += [f"  To run it on {machine}, copy the models into the folder:", f"    {again} --copy --no-evaluate"]
    lines += [f"  Take {folder} to {machine}, and there:", f'    sdflow generate {folder.name} --prompt "..."']
    return lines


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
    """ "MultiHeadAttention 32, GroupNorm 16": the fused operators of a graph."""
    return ", ".join(f"{name} {operators[name]}" for name in FUSED if operators.get(name))


def _shortened(shapes: Sequence[str]) -> str:
    """The first shapes; a UNet with ControlNets has too many for a line."""
    rest = len(shapes) - SHAPES_TOLD
    return ", ".join(shapes[:SHAPES_TOLD]) + (f" and {rest} more" if rest > 0 else "")
