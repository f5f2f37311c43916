"""What is told of an execution: to whom, while it goes on; and each step, when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sdflow.artifact import Record
from sdflow.build.step import Step

Outcome = Literal["cached", "fetched", "built", "checked"]


@dataclass(frozen=True)
class FinishedStep:
    """A step after execution. "fetched": from the remote cache. "checked": built again beside the cached result, with an
    equal digest."""

    step: Step
    outcome: Outcome
    record: Record

    @property
    def ran(self) -> bool:
        """Whether its pass was executed."""
        return self.outcome in ("built", "checked")


Steps = Mapping[str, tuple[FinishedStep, ...]]
"""Submodel -> its steps, in order; a refiner's are `refiner/SUBMODEL`."""


@dataclass(frozen=True)
class Expected:
    """What is about to run. chains: (pipeline, submodel) -> the ids of its steps. cached: of those, the steps that the cache has;
    None where that is not known. seconds: step -> how long it took when it last ran."""

    chains: Mapping[tuple[str, str], tuple[str, ...]]
    cached: frozenset[str] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def nothing_to_build(self) -> str | None:
        """What is said first of a run whose steps are all cached."""
        every = [step for steps in self.chains.values() for step in steps]
        if not every or self.cached is None or not self.cached.issuperset(every):
            return None
        return f"nothing to build: all {len(every)} steps are cached"


class Listener(Protocol):
    """Observes an execution; decides nothing. `note` is for what concerns no single step and should stay on the screen;
    `doing` for work that is no step, such as a verification: what it is, and its phase, which is "" when it ends.
    `expected` comes before anything runs, where that is known.

    Several steps may run at a time, each reported from a thread of its own. `started`: the step runs from now on; one
    that comes from the cache is only `finished`.
    """

    def expected(self, expected: Expected) -> None: ...
    def note(self, text: str) -> None: ...
    def doing(self, what: str, phase: str) -> None: ...
    def started(self, step: Step) -> None: ...
    def phase(self, step: Step, phrase: str) -> None: ...
    def memory(self, step: Step, resident: int) -> None: ...
    def finished(self, result: FinishedStep) -> None: ...
