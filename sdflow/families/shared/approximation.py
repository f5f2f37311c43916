"""Optional approximations that reduce work, at the cost of a slightly different image.

Reuse      reuse the denoiser's deep features over some steps, as in DeepCache (https://arxiv.org/abs/2312.00858)
Interval   apply guidance only in a part of the steps (https://arxiv.org/abs/2404.07724)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.errors import UsageError

REUSE, GUIDANCE_INTERVAL = "reuse", "guidance_interval"
"""Names in calls, a workflow's `generate` and an image's settings."""

MOST_EVERY, MOST_LAYERS = 100, 100
EXAMPLE, OFF = "every=2,from=0.1,to=0.9", "off"


@dataclass(frozen=True)
class Interval:
    """A range of the steps: of R denoiser runs, those from int(begin * R) up to but excluding int(end * R), as in
    diffusers.

    Raises UsageError unless 0 <= begin < end <= 1.
    """

    begin: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise UsageError(
                f"from {self.begin:g} to {self.end:g} is not a valid range of the steps",
                remedy="Use 0 <= `from` < `to` <= 1.",
            )

    def holds(self, index: int, runs: int) -> bool:
        """Whether the interval includes this run."""
        return _place(self.begin, runs) <= index < _place(self.end, runs)

    def settings(self) -> dict[str, Any]:
        """Return the settings as written in workflows."""
        return {"from": self.begin, "to": self.end}


@dataclass(frozen=True)
class Reuse:
    """Reuse of the denoiser's deep features.

    every: in the interval, the first of every this many runs is computed in full, and the others reuse its deep
    features. layers: number of outermost layers computed in those. Raises UsageError for invalid numbers.
    """

    every: int = 2
    interval: Interval = Interval()
    layers: int = 1

    def __post_init__(self) -> None:
        if not 2 <= self.every <= MOST_EVERY:
            raise UsageError(f"`every` is {self.every}", remedy=f"Use 2 to {MOST_EVERY}; 2 means every second run.")
        if not 1 <= self.layers <= MOST_LAYERS:
            raise UsageError(f"`layers` is {self.layers}", remedy=f"Use 1 to {MOST_LAYERS}.")

    def settings(self) -> dict[str, Any]:
        """Return the settings as written in workflows."""
        return {"every": self.every, **self.interval.settings(), "layers": self.layers}

    def reused(self, halves: Sequence[int]) -> tuple[bool, ...]:
        """Return, for each denoiser run, whether it reuses deep features of an earlier one.

        halves: batch halves of each run, 2 with guidance. Features are only reused from runs with as many; the first of
        these is computed in full.
        """
        found: list[bool] = []
        age = 0  # runs since the last full one
        for index, count in enumerate(halves):
            kept = (
                self.interval.holds(index, len(halves))
                and index > 0
                and self.interval.holds(index - 1, len(halves))
                and halves[index - 1] == count
                and age + 1 < self.every
            )
            age = age + 1 if kept else 0
            found.append(kept)
        return tuple(found)


@dataclass(frozen=True)
class Approximation:
    """The approximations of a call."""

    reuse: Reuse | None = None
    guidance: Interval | None = None

    @classmethod
    def chosen(cls, said: Mapping[str, Any], reuse: Any, guidance_interval: Any) -> Approximation:
        """Combine a caller's settings (None: use the pipeline's `Origin.said`; empty: none). Raises UsageError like
        `of`."""
        own = said.get(REUSE), said.get(GUIDANCE_INTERVAL)
        given = zip((reuse, guidance_interval), own, strict=True)
        return cls.of(*(((each or None) if each is not None else mine) for each, mine in given))

    @classmethod
    def of(cls, reuse: Any = None, guidance_interval: Any = None) -> Approximation:
        """Create from a caller's values: None, the dataclasses, or mappings as in workflows. Raises UsageError if
        invalid."""
        return cls(
            reuse if reuse is None or isinstance(reuse, Reuse) else read_reuse(reuse),
            guidance_interval
            if guidance_interval is None or isinstance(guidance_interval, Interval)
            else read_interval(guidance_interval),
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings by their names in calls; empty if exact."""
        found = {REUSE: self.reuse, GUIDANCE_INTERVAL: self.guidance}
        return {name: each.settings() for name, each in found.items() if each is not None}

    def spelled(self) -> str:
        """Return the settings as in options, for display."""
        found = self.settings().items()
        return ", ".join(
            f"{name} {','.join(f'{key}={value:g}' for key, value in each.items())}" for name, each in found
        )

    def __bool__(self) -> bool:
        return self != EXACT


EXACT = Approximation()


def read_reuse(value: Any) -> Reuse:
    """Read a mapping {every: 2, from: 0.1, to: 0.9, layers: 1}. Raises UsageError if invalid."""
    known = {"every": int, "from": float, "to": float, "layers": int}
    found = _read(value, known, REUSE)
    whole = {name: int(found[name]) for name in ("every", "layers") if name in found}
    try:
        return Reuse(interval=_interval(found), **whole)
    except UsageError as error:
        raise UsageError(error.what, where=REUSE, remedy=error.remedy) from error


def read_interval(value: Any) -> Interval:
    """Read a mapping {from: 0.1, to: 0.6}. Raises UsageError if invalid."""
    try:
        return _interval(_read(value, {"from": float, "to": float}, GUIDANCE_INTERVAL))
    except UsageError as error:
        raise UsageError(error.what, where=GUIDANCE_INTERVAL, remedy=error.remedy) from error


def parse(option: str, text: str) -> dict[str, float]:
    """Parse an option such as `every=2,from=0.1,to=0.9`; `off` is empty. Raises UsageError if malformed."""
    found: dict[str, float] = {}
    if text == OFF:
        return found
    if not text:
        raise UsageError("it is empty", where=option, remedy=f"Write it like {EXAMPLE}, or {OFF}.")
    for each in filter(None, text.split(",")):
        name, _, number = each.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or name.strip() in found:
            raise UsageError(f"{each!r} is not NAME=NUMBER", where=option, remedy=f"Write it like {EXAMPLE}.")
        found[name.strip()] = int(value) if value.is_integer() and name.strip() in ("every", "layers") else value
    return found


def _interval(found: Mapping[str, float]) -> Interval:
    return Interval(float(found.get("from", 0.0)), float(found.get("to", 1.0)))


def _read(value: Any, known: Mapping[str, type], where: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r:.40} is not a mapping", where=where, remedy=f"Its keys are {', '.join(known)}.")
    for name, number in value.items():
        if name not in known:
            raise UsageError(f"unknown key {name!r:.40}", where=where, remedy=f"Its keys are {', '.join(known)}.")
        whole = known[name] is int
        if (
            isinstance(number, bool)
            or not isinstance(number, int if whole else int | float)
            or not math.isfinite(number)
        ):
            kind = "a whole number" if whole else "a number"
            raise UsageError(f"{name} is {number!r:.40}, not {kind}", where=where)
    return dict(value)


def _place(part: float, runs: int) -> int:
    """Return int(part * runs), robust against float error: 0.29 * 100 is 29."""
    return int(round(part * runs, 6))
