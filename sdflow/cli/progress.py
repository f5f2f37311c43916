"""What one sees while steps run: a live view on a terminal, plain lines otherwise. Both go to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sdflow.cli.quiet import say
from sdflow.listener import FinishedStep, Listener
from sdflow.step import Step
from sdflow.units import spell_bytes, spell_seconds


@contextmanager
def progress_view() -> Iterator[Listener]:
    """The listener for this standard error."""
    if sys.stderr.isatty():
        live = LiveView()
        with live.shown():
            yield live
    else:
        yield PlainLines()


class PlainLines:
    """A line for each phase of a step and one when it ends: for CI logs and files.

    A phase that tells how far it is ("weights: 0.4 of 1.7 GB") is said again every few seconds only.
    """

    AGAIN_SECONDS = 5.0

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._told: set[str] = set()

    def _say(self, text: str) -> None:
        say(text)

    def note(self, text: str) -> None:
        self._say(text)

    def started(self, step: Step) -> None:
        self._begun[step.id] = time.perf_counter()
        self._said.pop(step.id, None)

    def phase(self, step: Step, phrase: str) -> None:
        name, now = phrase.partition(":")[0], time.perf_counter()
        last, then = self._said.get(step.id, ("", 0.0))
        if name == last and now - then < self.AGAIN_SECONDS:
            return
        self._said[step.id] = name, now
        self._say(f"{step.pipeline} {step.submodel} {step.name}: {phrase}")

    def memory(self, step: Step, resident: int) -> None:
        pass

    def finished(self, result: FinishedStep) -> None:
        step = result.step
        known = result.record.action.digest in self._told
        self._told.add(result.record.action.digest)
        if not result.ran:
            if known:  # many pipelines share it: once is enough
                return
            self._say(f"{step.pipeline} {step.submodel} {step.name}: {result.outcome}")
            return
        took = time.perf_counter() - self._begun[step.id]
        peak = spell_bytes(result.record.built["peak_memory"])
        self._say(
            f"{step.pipeline} {step.submodel} {step.name}: {result.outcome} in {spell_seconds(took)}, peak {peak}"
        )


class LiveView(PlainLines):
    """A spinner line with elapsed time, memory and phase per running step, above them a line per finished step."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=8, transient=True)
        self._running: dict[tuple[str, str], _Running] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._live:
            yield

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def started(self, step: Step) -> None:
        super().started(step)
        # A chain runs one step at a time: a step takes the place of what its submodel did before.
        self._running[step.pipeline, step.submodel] = _Running(step)

    def phase(self, step: Step, phrase: str) -> None:
        if running := self._running.get((step.pipeline, step.submodel)):
            running.phrase = phrase

    def memory(self, step: Step, resident: int) -> None:
        if running := self._running.get((step.pipeline, step.submodel)):
            running.resident = resident

    def finished(self, result: FinishedStep) -> None:
        self._running.pop((result.step.pipeline, result.step.submodel), None)
        super().finished(result)

    def _render(self):  # type: ignore[no-untyped-def]
        from rich.console import Group

        return Group(*(self._line(each) for each in list(self._running.values())))

    def _line(self, running: _Running):  # type: ignore[no-untyped-def]
        from rich.text import Text

        step = running.step
        elapsed = spell_seconds(time.perf_counter() - self._begun[step.id])
        memory = spell_bytes(running.resident) if running.resident else ""
        place = f"{step.pipeline} {step.submodel} {step.name}"
        running.spinner.update(text=Text(f"{place}  {elapsed}  {memory}  {running.phrase}"))
        return running.spinner


class _Running:
    """What is shown of a step that runs."""

    def __init__(self, step: Step) -> None:
        from rich.spinner import Spinner

        self.step = step
        self.phrase = "starting"
        self.resident = 0
        self.spinner = Spinner("dots")
