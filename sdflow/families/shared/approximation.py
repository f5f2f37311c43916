"""Ways to draw with less work than the model asks for: the image is near the exact one, not the same. Off unless asked for.

Reuse      deep features of the denoiser are kept over some steps, as DeepCache does (https://arxiv.org/abs/2312.00858)
Interval   guidance in a part of the steps only (https://arxiv.org/abs/2404.07724)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.errors import UsageError

REUSE, GUIDANCE_INTERVAL = "reuse", "guidance_interval"
"""What a call, a workflow's `generate` and an image's settings call them."""

MOST_EVERY, MOST_LAYERS = 100, 100
EXAMPLE, OFF = "every=2,from=0.1,to=0.9", "off"


@dataclass(frozen=True)
class Interval:
    """A part of the steps: of R runs of the denoiser those from int(begin * R) on, before int(end * R), as diffusers counts.

    Raises UsageError for no part of 0 to 1.
    """

    begin: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise UsageError(
                f"from {self.begin:g} to {self.end:g} is no part of the steps",
                remedy="`from` is at least 0, `to` at most 1 and above it.",
            )

    def holds(self, index: int, runs: int) -> bool:
        """Whether this run is in it."""
        return _place(self.begin, runs) <= index < _place(self.end, runs)

    def settings(self) -> dict[str, Any]:
        """As it is written."""
        return {"from": self.begin, "to": self.end}


@dataclass(frozen=True)
class Reuse:
    """every: in the interval, of so many runs the first is whole, and its deep features serve the others. layers: how many
    of the outermost layers run in those anew. Raises UsageError for other numbers."""

    every: int = 2
    interval: Interval = Interval()
    layers: int = 1

    def __post_init__(self) -> None:
        if not 2 <= self.every <= MOST_EVERY:
            raise UsageError(
                f"every {self.every} runs", remedy=f"`every` is from 2 to {MOST_EVERY}; 2: every second one."
            )
        if not 1 <= self.layers <= MOST_LAYERS:
            raise UsageError(f"{self.layers} layers", remedy=f"`layers` is from 1 to {MOST_LAYERS}.")

    def settings(self) -> dict[str, Any]:
        """As it is written."""
        return {"every": self.every, **self.interval.settings(), "layers": self.layers}

    def reused(self, halves: Sequence[int]) -> tuple[bool, ...]:
        """For each run of the denoiser, whether it takes the deep features of one before it.

        halves: of each run's batch, with guidance 2. Features are taken from a run with as many; the first of them is whole.
        """
        found: list[bool] = []
        age = 0  # runs since the last whole one
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
    """What of it a call does."""

    reuse: Reuse | None = None
    guidance: Interval | None = None

    @classmethod
    def chosen(cls, said: Mapping[str, Any], reuse: Any, guidance_interval: Any) -> Approximation:
        """What a caller says, each None: what is said of the pipeline (`Origin.said`), empty: none. Raises UsageError as `of`."""
        own = said.get(REUSE), said.get(GUIDANCE_INTERVAL)
        given = zip((reuse, guidance_interval), own, strict=True)
        return cls.of(*(((each or None) if each is not None else mine) for each, mine in given))

    @classmethod
    def of(cls, reuse: Any = None, guidance_interval: Any = None) -> Approximation:
        """From what a caller says: None, the dataclasses, or maps as in a workflow. Raises UsageError for what is none."""
        return cls(
            reuse if reuse is None or isinstance(reuse, Reuse) else read_reuse(reuse),
            guidance_interval
            if guidance_interval is None or isinstance(guidance_interval, Interval)
            else read_interval(guidance_interval),
        )

    def settings(self) -> dict[str, Any]:
        """By the names of a call; nothing where the image is exact."""
        found = {REUSE: self.reuse, GUIDANCE_INTERVAL: self.guidance}
        return {name: each.settings() for name, each in found.items() if each is not None}

    def spelled(self) -> str:
        """As options write it, for people."""
        found = self.settings().items()
        return ", ".join(
            f"{name} {','.join(f'{key}={value:g}' for key, value in each.items())}" for name, each in found
        )

    def __bool__(self) -> bool:
        return self != EXACT


EXACT = Approximation()


def read_reuse(value: Any) -> Reuse:
    """From a map {every: 2, from: 0.1, to: 0.9, layers: 1}. Raises UsageError for what is none."""
    known = {"every": int, "from": float, "to": float, "layers": int}
    found = _read(value, known, REUSE)
    whole = {name: int(found[name]) for name in ("every", "layers") if name in found}
    try:
        return Reuse(interval=_interval(found), **whole)
    except UsageError as error:
        raise UsageError(error.what, where=REUSE, remedy=error.remedy) from error


def read_interval(value: Any) -> Interval:
    """From a map {from: 0.1, to: 0.6}. Raises UsageError for what is none."""
    try:
        return _interval(_read(value, {"from": float, "to": float}, GUIDANCE_INTERVAL))
    except UsageError as error:
        raise UsageError(error.what, where=GUIDANCE_INTERVAL, remedy=error.remedy) from error


def parse(option: str, text: str) -> dict[str, float]:
    """What an option says: `every=2,from=0.1,to=0.9`; nothing for `off`. Raises UsageError where it is not of this form."""
    found: dict[str, float] = {}
    if text == OFF:
        return found
    if not text:
        raise UsageError("it says nothing", where=option, remedy=f"Write it like {EXAMPLE}, or {OFF}.")
    for each in filter(None, text.split(",")):
        name, _, number = each.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or name.strip() in found:
            raise UsageError(f"{each!r} is no NAME=NUMBER", where=option, remedy=f"Write it like {EXAMPLE}.")
        found[name.strip()] = int(value) if value.is_integer() and name.strip() in ("every", "layers") else value
    return found


def _interval(found: Mapping[str, float]) -> Interval:
    return Interval(float(found.get("from", 0.0)), float(found.get("to", 1.0)))


def _read(value: Any, known: Mapping[str, type], where: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r:.40} is no map", where=where, remedy=f"Its keys are {', '.join(known)}.")
    for name, number in value.items():
        if name not in known:
            raise UsageError(f"{name!r:.40} is not known", where=where, remedy=f"Its keys are {', '.join(known)}.")
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
    """int(part * runs), where 0.29 * 100 is 29."""
    return int(round(part * runs, 6))
