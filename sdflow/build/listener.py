"""What is told of an execution: to whom, while it goes on; and each step, when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


class Listener(Protocol):
    """Observes an execution; decides nothing. `note` is for what concerns no single step.

    Several steps may run at a time, each reported from a thread of its own. `started`: the step runs from now on; one
    that comes from the cache is only `finished`.
    """

    def note(self, text: str) -> None: ...
    def started(self, step: Step) -> None: ...
    def phase(self, step: Step, phrase: str) -> None: ...
    def memory(self, step: Step, resident: int) -> None: ...
    def finished(self, result: FinishedStep) -> None: ...
