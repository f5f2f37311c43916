"""Whether there is room for everything that a run will bind, before it begins."""

from __future__ import annotations

from sdflow.errors import UsageError
from sdflow.plan import BIND_PASS, Plan
from sdflow.store import Cache
from sdflow.store.layout import free_bytes

RESERVE = 64 << 20
"""Bytes for all that is small: graphs, records, results."""


def require_space(plan: Plan, cache: Cache) -> None:
    """Raises UsageError when the models whose graphs are there already will not fit on the cache's disk.

    A model whose graph is yet to be built is not counted: its size is known only then, and BindWeights looks again.
    """
    wanted = bytes_to_bind(plan, cache)
    free = free_bytes(cache.root)
    if wanted and sum(wanted.values()) + RESERVE > free:
        raise UsageError(
            f"{len(wanted)} models of {sum(wanted.values()) / 1e9:.2f} GB together are to be written, "
            f"and {free / 1e9:.2f} GB are free",
            where=str(cache.root),
            remedy="Run fewer at a time, free some space (sdflow cache gc), or put the cache on another disk (--cache).",
        )


def bytes_to_bind(plan: Plan, cache: Cache) -> dict[str, int]:
    """Key of a bind that is to be run -> the bytes of the model that it makes, where its graph is there."""
    wanted: dict[str, int] = {}
    for pipeline in plan.pipelines:
        graph = None
        for planned in pipeline.steps(cache):
            name, submodel = planned.step.name, planned.step.submodel
            if name == BIND_PASS and planned.action and not planned.record and graph and graph[0] == submodel:
                wanted[planned.action.digest] = graph[1]
            facts = planned.record.facts if planned.record else {}
            graph = (submodel, sum(each["bytes"] for each in facts["dtypes"].values())) if "dtypes" in facts else None
    return wanted
