"""What a run is about to do, as far as the cache knows: how many steps, which are cached, how long the others took last time."""

from __future__ import annotations

from sdflow.build.listener import Expected
from sdflow.build.plan import Plan
from sdflow.build.planned_step import PlannedStep
from sdflow.store import Cache


def expected(plan: Plan, cache: Cache, *, anew: bool = False) -> Expected:
    """The steps of every chain. anew: cached ones run as well. A remote cache is not asked: then what is cached is not known."""
    chains = {
        (step.pipeline, step.submodel): tuple(each.id for each in chain.steps)
        for pipeline in plan.every
        for chain in pipeline.chains
        for step in chain.steps[:1]
    }
    if cache.remote is not None:
        return Expected(chains)
    planned = [step for pipeline in plan.every for step in pipeline.steps(cache)]
    cached = frozenset(each.step.id for each in planned if each.state == "cached" and not anew)
    took = {
        each.step.id: seconds
        for each in planned
        if each.step.id not in cached and (seconds := _took(each, cache)) is not None
    }
    return Expected(chains, cached, took)


def _took(planned: PlannedStep, cache: Cache) -> float | None:
    """Seconds that the pass took when this step was last built, if that result is still in the cache."""
    record = planned.record
    if record is None and (action := cache.notes.last_action(planned.step.id)) is not None:
        record = cache.lookup(action)
    return None if record is None else float(record.built["seconds"])
