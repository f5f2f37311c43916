"""What one sees while steps run: a live view on a terminal, plain lines otherwise. Both go to standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sdflow.build.listener import FinishedStep, Listener
from sdflow.build.step import Step
from sdflow.cli.quiet import say
from sdflow.cli.terminal import live_console
from sdflow.printable import fitted, in_one_line
from sdflow.units import spell_bytes, spell_seconds

if TYPE_CHECKING:
    from rich.console import Console, Group, OverflowMethod
    from rich.text import Text


@contextmanager
def progress_view() -> Iterator[Listener]:
    """The listener for this standard error."""
    console = live_console()
    if console is None:
        yield PlainLines()
        return
    from rich.live import Live

    view = LiveView(console)  # whole before Live asks it for the first frame
    with Live(console=console, get_renderable=view.frame, refresh_per_second=8, transient=True):
        yield view


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
    """A line per running step, with its time, memory and phase; above them a line per finished step."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._unicode = console.encoding.lower().startswith("utf")
        self._running: dict[tuple[str, str], _Running] = {}

    def _say(self, text: str) -> None:
        for line in fitted(text, self._console.width):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def started(self, step: Step) -> None:
        super().started(step)
        # A chain runs one step at a time: a step takes the place of what its submodel did before.
        self._running[step.pipeline, step.submodel] = _Running(step, self._begun[step.id], self._unicode)

    def phase(self, step: Step, phrase: str) -> None:
        if running := self._running.get((step.pipeline, step.submodel)):
            running.phrase = phrase

    def memory(self, step: Step, resident: int) -> None:
        if running := self._running.get((step.pipeline, step.submodel)):
            running.resident = resident

    def finished(self, result: FinishedStep) -> None:
        self._running.pop((result.step.pipeline, result.step.submodel), None)
        super().finished(result)

    def frame(self) -> Group:
        """What is on the screen now: as many lines as fit, none of them wrapped."""
        from rich.console import Group
        from rich.text import Text

        now, room = time.perf_counter(), self._console.width
        running = list(self._running.values())
        lines = [each.line(now, room) for each in running]
        most = max(1, self._console.height - 1)
        if len(lines) > most:
            lines[most - 1 :] = [Text(f"and {len(lines) - most + 1} more", no_wrap=True, overflow="ellipsis")]
        return Group(*lines)


class _Running:
    """What is shown of a step that runs."""

    LEAST_PHRASE = 12
    """Columns: where fewer are left, the phase is not shown."""

    def __init__(self, step: Step, begun: float, unicode: bool) -> None:
        from rich.spinner import Spinner

        self.step = step
        self.begun = begun
        self.phrase = "starting"
        self.resident = 0
        self._spinner = Spinner("dots" if unicode else "line")
        self._overflow: OverflowMethod = "ellipsis" if unicode else "crop"

    def line(self, now: float, room: int) -> Text:
        """At most `room` columns. Where they are few, whole words are left out; what is cut off is at the line's end."""
        from rich.cells import cell_len
        from rich.text import Text

        step = self.step
        took = f"{spell_seconds(now - self.begun):>8}"
        memory = f"{spell_bytes(self.resident) if self.resident else '':>8}"
        name = f"{step.submodel} {step.name}"
        heads = [
            f"{took} {memory}  {step.pipeline} {name}",
            f"{took}  {step.pipeline} {name}",
            f"{took}  {name}",
            name,
            step.submodel,
        ]
        heads = [in_one_line(each) for each in heads]
        room -= 2  # the spinner, and the column where a terminal would go to the next line
        text = next((head for head in heads if cell_len(head) <= room), heads[-1])
        if room - cell_len(text) >= self.LEAST_PHRASE:
            text += f": {in_one_line(self.phrase)}"
        line = self._spinner.render(now)
        assert isinstance(line, Text)
        line.append(text)
        line.truncate(room + 1, overflow=self._overflow)
        line.no_wrap = True
        return line
