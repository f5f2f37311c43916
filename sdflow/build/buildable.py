"""Whether this machine can make everything that a run has to make, before it begins: it may lack torch, olive-ai, diffusers."""

from __future__ import annotations

from sdflow.build.imported import not_here
from sdflow.build.plan import Plan
from sdflow.machine.packages import lacks
from sdflow.store import Cache


def require_buildable(plan: Plan, cache: Cache, *, rebuild: bool = False) -> None:
    """Raises UsageError, naming all of them, for steps that are to run and whose packages are not installed.

    rebuild: steps that are cached are run, too.
    """
    missing = [
        planned.step
        for pipeline in plan.every
        for planned in pipeline.steps(cache)
        if planned.step.lacks and (rebuild or planned.state == "to run")
    ]
    if missing and rebuild:
        absent = sorted({package for step in missing for package in step.lacks})
        raise lacks("building every step anew, the structures too,", absent, "Leave out --clean_cache and --check.")
    if missing:
        raise not_here(missing, {name: target for each in plan.pipelines for name, target in each.targets.items()})
