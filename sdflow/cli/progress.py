"""What one sees while steps run: a live view on a terminal, plain lines otherwise. Both go to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sdflow.execute import FinishedStep, Listener
from sdflow.plan import Step
from sdflow.report.units import megabytes, seconds


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
    """One line when a step begins to run and one when it ends: for CI logs and files."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        self._say(text)

    def started(self, step: Step) -> None:
        self._begun[step.id] = time.perf_counter()

    def phase(self, step: Step, phrase: str) -> None:
        self._say(f"{step.pipeline} {step.submodel} {step.name}: {phrase}")

    def memory(self, step: Step, resident: int) -> None:
        pass

    def finished(self, result: FinishedStep) -> None:
        step = result.step
        if result.outcome == "cached":
            self._say(f"{step.pipeline} {step.submodel} {step.name}: cached")
            return
        took = time.perf_counter() - self._begun[step.id]
        peak = megabytes(result.record.built["peak_memory"])
        self._say(f"{step.pipeline} {step.submodel} {step.name}: {result.outcome} in {seconds(took)}, peak {peak}")


class LiveView(PlainLines):
    """A spinner line with elapsed time, memory and phase for the running step, above it a line per finished step."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=8, transient=True)
        self._step: Step | None = None
        self._phrase = ""
        self._resident = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._live:
            yield

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def started(self, step: Step) -> None:
        super().started(step)
        self._step, self._phrase, self._resident = step, "starting", 0

    def phase(self, step: Step, phrase: str) -> None:
        self._phrase = phrase

    def memory(self, step: Step, resident: int) -> None:
        self._resident = resident

    def finished(self, result: FinishedStep) -> None:
        self._step = None
        super().finished(result)

    def _render(self):  # type: ignore[no-untyped-def]
        from rich.spinner import Spinner
        from rich.text import Text

        step = self._step
        if step is None:
            return Text("")
        elapsed = seconds(time.perf_counter() - self._begun[step.id])
        memory = megabytes(self._resident) if self._resident else ""
        return Spinner(
            "dots", Text(f"{step.pipeline} {step.submodel} {step.name}  {elapsed}  {memory}  {self._phrase}")
        )
