"""What one sees while images are drawn: a bar on a terminal; elsewhere a line for each step, one a second at most."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sdflow.cli.quiet import say
from sdflow.cli.terminal import live_console
from sdflow.runtime.generate import Progress


@contextmanager
def image_progress() -> Iterator[Progress]:
    """What is told of the drawing, for this standard error."""
    console = live_console()
    if console is None:
        yield Progress(say, _Lines().step)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("loading", total=None)

        def step(label: str, done: int, total: int) -> None:
            bars.update(bar, description=f"image {label}", completed=done, total=total)

        yield Progress(lambda text: bars.update(bar, description=text), step)


class _Lines:
    SECONDS_BETWEEN = 1.0

    def __init__(self) -> None:
        self._said = 0.0

    def step(self, label: str, done: int, total: int) -> None:
        """The last step of an image is always told."""
        now = time.perf_counter()
        if done == total or now - self._said >= self.SECONDS_BETWEEN:
            self._said = now
            say(f"image {label}: step {done} of {total}")
