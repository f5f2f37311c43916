"""Progress while steps run: a live view on a terminal, plain lines otherwise. Both go to standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sdflow.build.listener import Expected, FinishedStep, Listener
from sdflow.build.step import Step
from sdflow.cli.quiet import say
from sdflow.cli.terminal import live_console
from sdflow.units import spell_bytes, spell_seconds


@contextmanager
def progress_view(*, quiet: bool = False, verbose: bool = False) -> Iterator[Listener]:
    """Yield the listener for this standard error. quiet: print nothing. verbose: keep a line for every phase and
    step."""
    if quiet:
        yield Silent()
        return
    console = None if verbose else live_console()
    if console is None:
        yield PlainLines()
        return
    from rich.live import Live

    from sdflow.cli.live import LiveView

    view = LiveView(console)  # whole before Live asks it for the first frame
    with Live(console=console, get_renderable=view.frame, refresh_per_second=8, transient=True):
        yield view
        view.end()


class Silent:
    """Prints nothing: errors and results are printed elsewhere."""

    def expected(self, expected: Expected) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def doing(self, what: str, phase: str) -> None:
        pass

    def started(self, step: Step) -> None:
        pass

    def phase(self, step: Step, phrase: str) -> None:
        pass

    def memory(self, step: Step, resident: int) -> None:
        pass

    def finished(self, result: FinishedStep) -> None:
        pass


class PlainLines:
    """A line for each phase of a step, and one when it ends: for CI logs and files.

    A phase that reports its progress ("weights: 0.4 of 1.7 GB") is repeated every AGAIN_SECONDS at most.
    """

    AGAIN_SECONDS = 5.0

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._told: set[str] = set()

    def expected(self, expected: Expected) -> None:
        if (nothing := expected.nothing_to_build()) is not None:
            say(nothing)

    def note(self, text: str) -> None:
        say(text)

    def doing(self, what: str, phase: str) -> None:
        if phase:
            say(f"{what}: {phase}")

    def started(self, step: Step) -> None:
        self._begun[step.id] = time.perf_counter()
        self._said.pop(step.id, None)

    def phase(self, step: Step, phrase: str) -> None:
        name, now = phrase.partition(":")[0], time.perf_counter()
        last, then = self._said.get(step.id, ("", 0.0))
        if name == last and now - then < self.AGAIN_SECONDS:
            return
        self._said[step.id] = name, now
        say(f"{step.pipeline} {step.submodel} {step.name}: {phrase}")

    def memory(self, step: Step, resident: int) -> None:
        pass

    def finished(self, result: FinishedStep) -> None:
        step = result.step
        known = result.record.action.digest in self._told
        self._told.add(result.record.action.digest)
        if not result.ran:
            if known:  # several pipelines share it
                return
            say(f"{step.pipeline} {step.submodel} {step.name}: {result.outcome}")
            return
        took = time.perf_counter() - self._begun[step.id]
        peak = spell_bytes(result.record.built["peak_memory"])
        say(f"{step.pipeline} {step.submodel} {step.name}: {result.outcome} in {spell_seconds(took)}, peak {peak}")
