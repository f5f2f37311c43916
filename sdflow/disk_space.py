"""Whether there is room for everything that a run will bind, before it begins."""

from __future__ import annotations

from sdflow.errors import CacheError
from sdflow.plan import BIND_PASS, Plan
from sdflow.store import Cache
from sdflow.store.layout import free_bytes
from sdflow.units import spell_bytes
from sdflow.weights.bind import RESERVE


def require_space(plan: Plan, cache: Cache, *, rebuild: bool = False) -> None:
    """Raises CacheError when the models whose graphs are there already will not fit on the cache's disk.

    rebuild: those that are in the cache are built anew, beside the old ones.
    A model whose graph is yet to be built, or whose chain carries its weights, is not counted: its size is not known
    yet. BindWeights looks again.
    """
    wanted = bytes_to_bind(plan, cache, rebuild=rebuild)
    free, total = free_bytes(cache.root), sum(wanted.values())
    if wanted and total + RESERVE > free:
        raise CacheError(
            f"{len(wanted)} models of {spell_bytes(total)} together are to be written, with a reserve of "
            f"{spell_bytes(RESERVE)}, and {spell_bytes(free)} are free",
            where=str(cache.root),
            remedy="Run fewer at a time, free some space (sdflow cache gc), or put the cache on another disk (--cache).",
        )


def bytes_to_bind(plan: Plan, cache: Cache, *, rebuild: bool = False) -> dict[str, int]:
    """Key of a bind that is to be run -> the bytes of the model that it makes, where its graph is there."""
    wanted: dict[str, int] = {}
    for pipeline in plan.every:
        graph = None
        for planned in pipeline.steps(cache):
            name, submodel = planned.step.name, planned.step.submodel
            if (
                name == BIND_PASS
                and planned.action
                and (rebuild or not planned.record)
                and graph
                and graph[0] == submodel
            ):
                wanted[planned.action.digest] = graph[1]
            facts = planned.record.facts if planned.record else {}
            graph = (submodel, sum(each["bytes"] for each in facts["dtypes"].values())) if "dtypes" in facts else None
    return wanted
