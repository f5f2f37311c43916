"""Events of an execution for listeners, and the result of a finished step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sdflow.artifact import Record
from sdflow.build.step import Step

Outcome = Literal["cached", "fetched", "built", "checked"]


@dataclass(frozen=True)
class FinishedStep:
    """A step after execution. "fetched": from the remote cache. "checked": built again, with the digest of the cached
    result."""

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
    """The upcoming work. chains: (pipeline, submodel) -> step ids. cached: the steps in the cache; None if unknown.
    seconds: step -> its last duration."""

    chains: Mapping[tuple[str, str], tuple[str, ...]]
    cached: frozenset[str] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def nothing_to_build(self) -> str | None:
        """The message if all steps are cached."""
        every = [step for steps in self.chains.values() for step in steps]
        if not every or self.cached is None or not self.cached.issuperset(every):
            return None
        return f"nothing to build: all {len(every)} steps are cached"


class Listener(Protocol):
    """Observes an execution. `expected` comes before anything runs, if known. `note` is for lasting messages that
    belong to no single step; `doing` for work outside steps, such as a verification: its name, and its phase, "" at the
    end.

    Steps may run concurrently, each reported from its own thread. `started`: the step runs from now on; a cached one is
    only reported as `finished`.
    """

    def expected(self, expected: Expected) -> None: ...
    def note(self, text: str) -> None: ...
    def doing(self, what: str, phase: str) -> None: ...
    def started(self, step: Step) -> None: ...
    def phase(self, step: Step, phrase: str) -> None: ...
    def memory(self, step: Step, resident: int) -> None: ...
    def finished(self, result: FinishedStep) -> None: ...
