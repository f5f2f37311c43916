"""What A1111's webui calls schedulers: a sampler, and a schedule of its timesteps."""

from __future__ import annotations

from collections.abc import Collection

from sdflow.families.shared.sampler_names import SAMPLERS, SGM_UNIFORM, TRAILING
from sdflow.serve.api_error import ApiError

SCHEDULES = {"Automatic": "", SGM_UNIFORM: TRAILING}
"""How the names of schedulers end, by the webui's name of the schedule."""


def scheduler_of(
    sampler: str | None, schedule: str | None, eta: float | None, schedulers: Collection[str]
) -> str | None:
    """The scheduler of a sampler and a schedule, which may be the last word of the sampler's name, as in "DPM++ 2M Karras"; None:
    the pipeline's own. schedulers: that the pipeline has. Raises ApiError."""
    own = {name.lower(): scheduler for name, scheduler in SAMPLERS.items()} | {each: each for each in SAMPLERS.values()}
    endings = {name.lower().replace("_", " "): ending for name, ending in SCHEDULES.items()}
    plain, kind = (sampler or "automatic").lower(), (schedule or "automatic").lower().replace("_", " ")
    if plain not in own and plain != "automatic":
        base, _, last = plain.rpartition(" ")
        if base in own:
            plain, kind = base, last
    if plain not in own and plain != "automatic":
        raise _unknown(f"no sampler is named {sampler!r} here, only {', '.join(SAMPLERS)}.", "sampler_name")
    if kind not in endings:
        raise _unknown(f"no schedule is named {kind!r} here, only {', '.join(SCHEDULES)}.", "scheduler")
    if plain == "automatic":
        if endings[kind]:
            raise _unknown(f"the schedule {kind!r} needs a sampler: name one.", "scheduler")
        return None
    if own[plain] == "euler_a" and eta not in (None, 1.0):
        raise _unknown(f"{sampler} with an eta of {eta:g} is not supported: send 1.", "eta")
    found = f"{own[plain]}{endings[kind]}"
    return f"flow_{found}" if found not in schedulers and f"flow_{found}" in schedulers else found


def _unknown(words: str, param: str) -> ApiError:
    return ApiError(400, words, param=param, code="invalid_value")
