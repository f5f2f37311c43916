"""The live view: a line per submodel being built, one per other activity, and a bar over all steps.

A finished submodel becomes a permanent line above.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdflow.build.listener import Expected, FinishedStep
from sdflow.build.step import Step
from sdflow.printable import fitted, in_one_line
from sdflow.units import spell_bytes, spell_seconds

if TYPE_CHECKING:
    from rich.console import Console, Group, OverflowMethod
    from rich.spinner import Spinner
    from rich.text import Text

Chain = tuple[str, str]
"""Pipeline and submodel."""

WORTH_ESTIMATING = 5.0
"""Estimates below this many seconds are not shown."""
BAR = 24


class LiveView:
    """Renders frames of the current activity; `end` prints what remains."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unicode = console.encoding.lower().startswith("utf")
        self._begun = time.perf_counter()
        self._lock = threading.Lock()  # steps of several chains end at the same time
        self._expected = Expected({})
        self._running: dict[Chain, _Running] = {}
        self._done: dict[Chain, list[FinishedStep]] = {}
        self._besides: dict[str, tuple[str, float, Spinner]] = {}
        self._told: set[str] = set()

    def _say(self, text: str, style: str = "") -> None:
        """Print lines above the view. style: of the first word, a mark."""
        from rich.text import Text

        for number, each in enumerate(fitted(text, self._console.width)):
            line = Text(each)
            if style and number == 0:
                line.stylize(style, 0, len(each.partition(" ")[0]))
            self._console.print(line, highlight=False, soft_wrap=True)

    def expected(self, expected: Expected) -> None:
        self._expected = expected
        if (nothing := expected.nothing_to_build()) is not None:
            self._say(nothing)

    def note(self, text: str) -> None:
        self._say(text)

    def doing(self, what: str, phase: str) -> None:
        if not phase:
            self._besides.pop(what, None)
            return
        _, begun, spinner = self._besides.get(what, ("", time.perf_counter(), _spinner(self._unicode)))
        self._besides[what] = phase, begun, spinner

    def started(self, step: Step) -> None:
        # A chain runs one step at a time: a new step replaces the submodel's previous one.
        ids = self._expected.chains.get((step.pipeline, step.submodel), ())
        seconds = self._expected.seconds.get(step.id)
        self._running[step.pipeline, step.submodel] = _Running(step, len(ids), seconds, self._unicode)

    def phase(self, step: Step, phrase: str) -> None:
        if running := self._running.get((step.pipeline, step.submodel)):
            running.phrase = phrase

    def memory(self, step: Step, resident: int) -> None:
        if running := self._running.get((step.pipeline, step.submodel)):
            running.resident = resident

    def finished(self, result: FinishedStep) -> None:
        chain = result.step.pipeline, result.step.submodel
        self._running.pop(chain, None)
        with self._lock:
            # A restarted chain drops its earlier results.
            done = [each for each in self._done.get(chain, []) if each.step.index < result.step.index]
            self._done[chain] = [*done, result]
            if len(self._done[chain]) >= len(self._expected.chains.get(chain, ())):
                self._collapse(chain)

    def _collapse(self, chain: Chain) -> None:
        """Print a finished submodel's line, unless it is cached and another pipeline's line covers it."""
        steps = self._done[chain]
        ran = [each for each in steps if each.ran]
        known = self._told.issuperset(each.record.action.digest for each in steps)
        self._told.update(each.record.action.digest for each in steps)
        every = self._expected.nothing_to_build() is not None  # announced for all of them
        if (known or every) and not ran:
            return
        self._say(f"{'✓' if self._unicode else '+'} {' '.join(chain)}: {_words(steps, ran)}", style="green")

    def end(self) -> None:
        """Print submodels whose number of steps differed from the expected one."""
        for chain, steps in self._done.items():
            if not self._told.issuperset(each.record.action.digest for each in steps):
                self._collapse(chain)

    def frame(self) -> Group:
        """The current screen: as many lines as fit, none of them wrapped."""
        from rich.console import Group
        from rich.text import Text

        now, room = time.perf_counter(), self._console.width
        lines = [each.line(now, room) for each in list(self._running.values())]
        lines += [
            _one_line(
                spinner.render(now), [f"{spell_seconds(now - begun):>8}  {what}", what], phase, room, self._unicode
            )
            for what, (phase, begun, spinner) in list(self._besides.items())
        ]
        bar = self._bar(now, room)
        most = max(1, self._console.height - (1 if bar is None else 2))
        if len(lines) > most:
            lines[most - 1 :] = [Text(f"and {len(lines) - most + 1} more", no_wrap=True, overflow="ellipsis")]
        return Group(*lines, *([] if bar is None else [bar]))

    def _bar(self, now: float, room: int) -> Text | None:
        """ "━━━━──── 5 of 11 steps, 32.1 s, up to 41 s left"; None before the total is known and after the last
        step."""
        from rich.text import Text

        total = sum(map(len, self._expected.chains.values()))
        done = sum(len(self._done.get(chain, ())) for chain in self._expected.chains)
        if not total or done >= total or self._console.height < 3:
            return None
        words = f"{done} of {total} steps, {spell_seconds(now - self._begun)}"
        if (left := self._left(now)) is not None:
            words += f", up to {spell_seconds(left)} left"
        filled = BAR * done // total
        line = Text("  ", no_wrap=True, overflow="ellipsis" if self._unicode else "crop")
        if room > BAR + len(words) + 4:
            line.append(("━" if self._unicode else "#") * filled, style="green")
            line.append(("─" if self._unicode else "-") * (BAR - filled), style="dim")
            line.append("  ")
        line.append(words)
        line.truncate(max(room - 1, 1), overflow=line.overflow)
        return line

    def _left(self, now: float) -> float | None:
        """Seconds that the remaining steps took last time, in sequence; None if one of them never ran."""
        cached, seconds = self._expected.cached, self._expected.seconds
        if cached is None:
            return None
        done = {each.step.id for steps in self._done.values() for each in steps}
        to_come = {step for steps in self._expected.chains.values() for step in steps} - done - cached
        if not to_come <= set(seconds):
            return None
        running = {each.step.id: now - each.begun for each in list(self._running.values())}
        left = sum(max(0.0, seconds[step] - running.get(step, 0.0)) for step in to_come)
        return left if left >= WORTH_ESTIMATING else None


def _words(steps: Sequence[FinishedStep], ran: Sequence[FinishedStep]) -> str:
    outcomes = dict.fromkeys(each.outcome for each in steps if not each.ran)
    if not ran:
        return f"{len(steps)} steps {', '.join(outcomes)}"
    took = spell_seconds(sum(each.record.built["seconds"] for each in ran))
    peak = spell_bytes(max(each.record.built["peak_memory"] for each in ran))
    some = f"{len(ran)} of {len(steps)} steps" if outcomes else f"{len(steps)} step{'s' if len(steps) > 1 else ''}"
    return f"{some} {ran[-1].outcome} in {took}, peak {peak}"


def _spinner(unicode: bool) -> Spinner:
    from rich.spinner import Spinner

    return Spinner("dots" if unicode else "line")


def _one_line(line: object, heads: Sequence[str], phrase: str, room: int, unicode: bool) -> Text:
    """A spinner, the longest head that fits, and the phrase if there is room: at most `room` - 1 columns."""
    from rich.cells import cell_len
    from rich.text import Text

    assert isinstance(line, Text)
    overflow: OverflowMethod = "ellipsis" if unicode else "crop"
    heads = [in_one_line(each) for each in heads]
    room -= 2  # the spinner, and the column where a terminal would wrap
    text = next((head for head in heads if cell_len(head) <= room), heads[-1])
    if room - cell_len(text) >= LEAST_PHRASE:
        text += f": {in_one_line(phrase)}"
    line.append(text)
    line.truncate(room + 1, overflow=overflow)
    line.no_wrap = True
    return line


LEAST_PHRASE = 12
"""The phase is hidden if fewer columns are left."""


class _Running:
    """The display of a running step. steps: of its submodel, 0 if unknown. seconds: the last duration."""

    def __init__(self, step: Step, steps: int, seconds: float | None, unicode: bool) -> None:
        self.step = step
        self.begun = time.perf_counter()
        self.phrase = "starting"
        self.resident = 0
        self._steps, self._seconds, self._unicode = steps, seconds, unicode
        self._spinner = _spinner(unicode)

    def line(self, now: float, room: int) -> Text:
        """The line in at most `room` columns: narrow terminals drop whole words first, then cut off the end."""
        step = self.step
        took = f"{spell_seconds(now - self.begun):>8}"
        if self._seconds is not None and self._seconds >= WORTH_ESTIMATING:
            took += f" of about {spell_seconds(round(self._seconds))}"
        memory = f"{spell_bytes(self.resident) if self.resident else '':>8}"
        name = f"{step.submodel} {step.name}"
        counted = f"{name} ({step.index + 1}/{self._steps})" if self._steps > 1 else name
        heads = [
            f"{took} {memory}  {step.pipeline} {counted}",
            f"{took} {memory}  {step.pipeline} {name}",
            f"{took}  {step.pipeline} {name}",
            f"{took}  {name}",
            name,
            step.submodel,
        ]
        return _one_line(self._spinner.render(now), heads, self.phrase, room, self._unicode)
