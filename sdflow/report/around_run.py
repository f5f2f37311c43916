"""What `sdflow run` says before it builds, and of a target that this machine cannot run."""

from __future__ import annotations

import sys

from sdflow.build.plan import Plan
from sdflow.manifest import read_manifest
from sdflow.run.options import RunOptions
from sdflow.run.run import PipelineResult
from sdflow.store import Cache
from sdflow.targets import TARGETS

_MACHINES = {"win32": "a Windows machine", "linux": "a Linux machine", "darwin": "a Mac"}


def to_build(plan: Plan, cache: Cache, options: RunOptions) -> str:
    """How many steps are to be built, and what follows them: "11 of 11 steps to build; measurement follows ...". "" where every
    step is cached, which progress says itself, and nothing follows."""
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
        without = " (--no-evaluate: no measurement)" if measured and not building else ""
        said.append(f"{' and '.join(follows)} follow{'s' if len(follows) == 1 else ''} as the workflow says{without}")
    return "; ".join(said)


def elsewhere(pipeline: PipelineResult, again: str) -> list[str]:
    """How to run a pipeline that was not measured since its target is not here. again: the command that built it."""
    assert pipeline.evaluation is not None, "it was to be measured"
    target, folder, remedy = TARGETS[pipeline.plan.pipeline.target], pipeline.folder, pipeline.evaluation.remedy
    impossible = target.platform is not None and sys.platform != target.platform
    machine = _MACHINES[target.platform] if target.platform is not None else f"a machine with {target.title}"
    lines = [] if impossible or remedy is None else [f"  To measure it here: {remedy}"]
    if not read_manifest(folder).copied:
        lines += [f"  To run it on {machine}, copy the models into the folder:", f"    {again} --copy --no-evaluate"]
    lines += [f"  Take {folder} to {machine}, and there:", f'    sdflow generate {folder.name} --prompt "..."']
    return lines
