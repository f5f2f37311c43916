"""What is known of a step before anything runs: whether the cache or the remote cache has it, and if not, why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sdflow.artifact import Action, Record
from sdflow.build.chain import Chain
from sdflow.build.imported import why_not_here
from sdflow.build.step import Step
from sdflow.store import Cache, Failure, explain

MOST_SHOWN = 100
"""Characters of an error, where a step has a line."""


@dataclass(frozen=True)
class PlannedStep:
    """A step with what is known of it now. `action` is None while its input has yet to be built. "remote": it comes from the
    remote cache. failure: how it failed since it was last built, or found in the cache."""

    step: Step
    state: Literal["cached", "remote", "to run"]
    action: Action | None
    record: Record | None
    reasons: tuple[str, ...]
    failure: Failure | None = None

    def seconds(self, cache: Cache) -> float | None:
        """That the pass took when this step was last built, if that result is still in the cache."""
        record = self.record
        if record is None and (action := cache.notes.last_action(self.step.id)) is not None:
            record = cache.lookup(action)
        return None if record is None else float(record.built["seconds"])


def look_up(chain: Chain, cache: Cache) -> list[PlannedStep]:
    """A chain's steps, as the cache has them now; those that carry the weights, where one without is known to look at them."""
    planned = list(_each(chain.steps, chain.ready, cache))
    if any(each.action and each.state == "to run" and reads_weights(each.action, cache) for each in planned):
        return list(_each(chain.carried, chain.ready, cache))
    return planned


def _each(steps: Sequence[Step], ready: bool, cache: Cache) -> Iterator[PlannedStep]:
    before: str | None = None
    waiting = None if ready else "its checkpoint or a LoRA is not downloaded yet"
    for step in steps:
        if waiting is not None:
            yield PlannedStep(step, "to run", None, None, (waiting,))
            continue
        if not step.has_key:
            yield PlannedStep(step, "to run", None, None, (why_not_here(step),))
            waiting = "its input is not here"
            continue
        action = step.action(before, cache.salt)
        record = cache.lookup(action)
        failure = cache.notes.last_failure(step.id)
        if record is not None:
            yield PlannedStep(step, "cached", action, record, (), failure)
            before = record.artifact.digest
        elif cache.remote is not None and (entry := cache.remote.look(action)) is not None:
            yield PlannedStep(step, "remote", action, None, (f"fetched from {cache.remote.spec.shown}",))
            before = entry.object
        else:
            reasons = (why_not_here(step),) if step.lacks else _why_not_cached(step, action, failure, cache)
            yield PlannedStep(step, "to run", action, None, reasons, failure)
            waiting = "its input is built by the step before"


def _why_not_cached(step: Step, action: Action, failure: Failure | None, cache: Cache) -> tuple[str, ...]:
    """In words: that it failed, or what differs from the last build of the same step, or from its last attempt."""
    if failure is not None:
        begins = next(iter(failure.error.splitlines()), "")
        failed = f"failed {failure.at}: {begins if len(begins) <= MOST_SHOWN else begins[: MOST_SHOWN - 3] + '...'}"
        return (failed, *(f"changed since: {line}" for line in explain(failure.action, action)))
    last = cache.notes.last_action(step.id)
    if last is not None and last.digest == action.digest:
        return ("its cached result is gone from the cache",)
    return explain(last, action)


def remember_reading(action: Action, cache: Cache) -> None:
    """Note that a pass that ran without weights looked at one: the next run goes on with the weights at once."""
    cache.notes.remember_step(f"reads weights/{action.digest}", action)


def reads_weights(action: Action, cache: Cache) -> bool:
    """Whether that is noted of this action."""
    return cache.notes.last_action(f"reads weights/{action.digest}") == action
