"""What A1111's webui calls schedulers: a sampler, and a schedule type of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdflow.families.shared.sampler_names import AUTOMATIC, available, scheduler_of, unknown
from sdflow.families.shared.schedulers import SAMPLERS, SPACINGS, SchedulerRow
from sdflow.serve.api_error import ApiError
from sdflow.serve.http.served_model import ServedModel


def samplers_of(models: Mapping[str, ServedModel]) -> list[dict[str, Any]]:
    """Those of any of the pipelines. One of noise and one of flow matching may have one name."""
    known = {name: row for model in models.values() for name, row in model.schedulers.items() if name in SAMPLERS}
    found: dict[str, list[str]] = {}
    for name in available(known):
        found.setdefault(SAMPLERS[name].webui or name, []).append(name)
    automatic = {label: SAMPLERS[names[0]].automatic for label, names in found.items()}
    return [
        {"name": label, "aliases": names, "options": {"scheduler": automatic[label]} if automatic[label] else {}}
        for label, names in found.items()
    ]


def schedule_types() -> list[dict[str, Any]]:
    """What a request may name beside its sampler."""
    labels = {"automatic": AUTOMATIC, "uniform": "Uniform", **{name: each.webui for name, each in SPACINGS.items()}}
    rest = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    return [{"name": name, "label": label, **rest} for name, label in labels.items()]


def requested_scheduler(
    sampler: str | None, schedule: str | None, eta: float | None, schedulers: Mapping[str, SchedulerRow]
) -> str | None:
    """The scheduler of a sampler and a schedule type; None: the pipeline's own. Without a schedule type the webui takes the
    sampler's usual one. Raises ApiError."""
    if sampler is None or sampler == AUTOMATIC:
        if schedule in (None, "", AUTOMATIC, AUTOMATIC.lower()):
            return None
        raise _refused(f"the schedule type {schedule!r} needs a sampler: send sampler_name too.", "scheduler")
    told = schedule or (None if sampler in schedulers else AUTOMATIC)  # our own names say it all
    found = scheduler_of(sampler, told, schedulers)
    if found is None and scheduler_of(sampler, None, schedulers) is not None:
        raise _refused(f"{sampler} takes no schedule type {schedule!r} here; see /sdapi/v1/schedulers.", "scheduler")
    if found is None:
        raise _refused(f"{unknown(sampler, schedulers)}; see /sdapi/v1/samplers.", "sampler_name")
    if eta not in (None, 1.0) and found.partition("_a")[1]:
        raise _refused(f"{sampler} with an eta of {eta:g} is not supported: send 1.", "eta")
    return found


def _refused(words: str, param: str) -> ApiError:
    return ApiError(400, words, param=param, code="invalid_value")
