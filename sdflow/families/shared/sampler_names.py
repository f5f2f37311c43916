"""Names of schedulers in other programs: a sampler and a schedule type in A1111's webui ("DPM++ 2M", "Karras"), a
sampler and a scheduler in ComfyUI ("dpmpp_2m", "karras"), a scheduler in InvokeAI ("dpmpp_2m_k")."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.schedulers import SAMPLERS, SCHEDULERS, SPACINGS, SchedulerRow, parts_of, requirements
from sdflow.machine.packages import how_to_install, missing

_FLOW = "flow_"
AUTOMATIC = "Automatic"
_PLAIN = ("uniform", "normal")
"""Schedule types of the webui that keep the model's own spacing."""


def _normal(text: str) -> str:
    """Normalize spelling differences between programs: case, spaces, `++` or `pp`, the prefix `k_`."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^(sample_)?k[ _]", "", text.lower().strip()).replace("++", "pp"))


def _spellings(name: str) -> Iterator[str]:
    """Yield all normalized names of one of SCHEDULERS."""
    sampler, spacing = parts_of(name)
    row = SAMPLERS[sampler]
    own = (sampler, sampler.removeprefix(_FLOW), row.webui, row.comfyui, row.invokeai)
    behind = (spacing, SPACINGS[spacing].webui, *SPACINGS[spacing].others) if spacing else ("",)
    for each in filter(None, own):
        yield from (_normal(f"{each} {more}") for more in behind)


_KNOWN = {name: frozenset(_spellings(name)) for name in SCHEDULERS}


def scheduler_of(
    sampler: str, schedule: str | None = None, among: Mapping[str, SchedulerRow] = SCHEDULERS
) -> str | None:
    """Return the name in `among` for any program's sampler name, such as "DPM++ 2M Karras" or "dpmpp_2m_k", or None.
    schedule: the webui's schedule type, or ComfyUI's scheduler, if separate."""
    wanted, told = _normal(sampler), "" if schedule is None else _normal(schedule)
    own = next((name for name in among if wanted in _KNOWN[name]), None)
    if own is None or told in ("", *_PLAIN) or parts_of(own)[1]:  # "DPM++ 2M Karras" already includes a schedule type
        return own
    if told == _normal(AUTOMATIC):
        automatic = f"{own}_{SAMPLERS[own].automatic}"
        return automatic if automatic in among else own
    return next((name for name in among if wanted + told in _KNOWN[name]), None)


def known_scheduler(text: str, where: str = "--scheduler", schedulers: Mapping[str, SchedulerRow] = SCHEDULERS) -> str:
    """Return a scheduler's name for any spelling. schedulers: the family's, if known. Raises UsageError with the
    closest names if unknown."""
    if (found := scheduler_of(text, among=schedulers)) is not None:
        return found
    raise UsageError(unknown(text, schedulers), where=where, remedy=f"Known: {listed(schedulers)}.")


def require_installed(name: str) -> None:
    """Raise UsageError if a package that one of SCHEDULERS requires is missing."""
    if absent := missing(*requirements(name)):
        raise UsageError(
            f"{name} needs {', '.join(absent)}, which is not installed",
            where="--scheduler",
            remedy=how_to_install(*absent),
        )


def read_scheduler(text: str) -> str:
    """Return the name of a scheduler of any family for any spelling. Raises ValueError with the closest names."""
    if (found := scheduler_of(text)) is None:
        raise ValueError(unknown(text))
    return found


def unknown(text: str, schedulers: Mapping[str, SchedulerRow] = SCHEDULERS) -> str:
    """Return the message for an unknown scheduler name, with the closest known names."""
    spelled: dict[str, str] = {}
    for name in schedulers:
        for each in _KNOWN[name]:
            spelled.setdefault(each, name)
    near = dict.fromkeys(spelled[each] for each in get_close_matches(_normal(text), spelled, n=6, cutoff=0.5))
    if not near:
        near = dict.fromkeys(get_close_matches(text.lower(), schedulers, n=1, cutoff=0.3))
    hint = f"; did you mean {' or '.join(map(repr, list(near)[:3]))}?" if near else ""
    if scheduler_of(text) is not None:
        return f"{text:.60} does not fit this model{hint}"
    return f"no scheduler is named {text!r:.60}{hint}"


def listed(schedulers: Mapping[str, SchedulerRow]) -> str:
    """List the names: each sampler, and the spacing suffixes it supports."""
    spacings: dict[str, list[str]] = {}
    for name in schedulers:
        sampler, spacing = parts_of(name)
        spacings.setdefault(sampler, []).extend([spacing] if spacing else [])
    groups: dict[tuple[str, ...], list[str]] = {}
    for sampler, own in spacings.items():
        groups.setdefault(tuple(own), []).append(sampler)
    return "; ".join(
        ", ".join(names) + (f" (also with {', '.join(f'_{each}' for each in own)})" if own else "")
        for own, names in groups.items()
    )


def available(schedulers: Mapping[str, SchedulerRow]) -> tuple[str, ...]:
    """Return the schedulers whose requirements are installed."""
    return tuple(name for name in schedulers if not missing(*requirements(name)))


def of_each_kind(schedulers: Mapping[str, SchedulerRow]) -> tuple[str, ...]:
    """Return schedulers, with installed requirements, that cover each sampler and each spacing once."""
    found: dict[tuple[str, str], str] = {}
    for name in available(schedulers):
        sampler, spacing = parts_of(name)
        found.setdefault(("", spacing) if spacing else (sampler, ""), name)
    return tuple(found.values())


def scheduler_name(scheduler: Any) -> str | None:
    """Return the name in `SCHEDULERS` of a diffusers scheduler, or None if its class or settings have none."""
    config = scheduler.config
    fitting = [
        (len(options), name)
        for name, (cls, options) in SCHEDULERS.items()
        if cls == type(scheduler).__name__ and all(config.get(key) == value for key, value in options.items())
    ]
    return max(fitting)[1] if fitting else None


def webui_names(name: str) -> tuple[str, str | None] | None:
    """Return A1111's sampler and schedule type of one of SCHEDULERS (type None if it is the webui's default), or None
    if the webui has no such sampler."""
    sampler, spacing = parts_of(name)
    row = SAMPLERS[sampler]
    if not row.webui:
        return None
    return row.webui, SPACINGS[spacing].webui if spacing else "Uniform" if row.automatic else None


def invokeai_name(name: str) -> str | None:
    """Return InvokeAI's name of one of SCHEDULERS, or None. InvokeAI cannot express trailing timesteps; they are
    dropped."""
    sampler, spacing = parts_of(name)
    found = SAMPLERS[sampler].invokeai
    if not found or spacing in ("", "trailing"):
        return found or None
    return f"{found}_k" if spacing == "karras" else None


def invokeai_scheduler(theirs: str) -> str | None:
    """Return the scheduler with this name in InvokeAI, or None."""
    plain = theirs.removesuffix("_k")
    own = next((name for name, row in SAMPLERS.items() if row.invokeai == plain), None)
    found = own if own is None or plain == theirs else f"{own}_karras"
    return found if found in SCHEDULERS else None
