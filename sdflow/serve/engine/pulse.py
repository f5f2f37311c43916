"""Heartbeats of the worker, and a watchdog that kills a worker that is stopped or hangs in a kernel.

The worker reports twice a second whether an image has made no progress for too long: several times what loading and the
first image took, and more for larger images.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdflow.serve.jobs import Lost

if TYPE_CHECKING:
    from sdflow.serve.engine.lanes import Lanes
    from sdflow.serve.jobs import Job

PULSE_SECONDS = 0.5

LEAST_SECONDS, TIMES = 60.0, 10
"""Minimum limit of a task, and its limit as a multiple of the slowest task at startup."""

START_SECONDS = 300.0
"""Maximum silence of a worker that has measured nothing yet."""


@dataclass(frozen=True)
class Pulse:
    """A heartbeat. stuck: seconds without progress, if above the limit. silence: maximum seconds to the next
    message."""

    stuck: float | None = None
    silence: float = START_SECONDS


@dataclass(frozen=True)
class Patience:
    """How long a task may take. seconds: for the model's own size. most: for any size. pixels: own size by pipeline;
    the limit grows with the square of the pixels, as attention does."""

    seconds: float
    most: float
    pixels: Mapping[str, int]

    def of(self, jobs: tuple[Job, ...]) -> float:
        """Return the limit for a lane with these running jobs."""
        sizes = [each.arguments.get("height", 0) * each.arguments.get("width", 0) for each in jobs]
        largest = max((size / self.pixels[job.pipeline] for size, job in zip(sizes, jobs, strict=True)), default=1.0)
        return min(self.seconds * max(1.0, largest) ** 2, self.most)


class Pulses:
    """Heartbeats of the worker. tell: receives them, on a separate thread."""

    def __init__(self, tell: Callable[[Pulse], None]) -> None:
        self._tell = tell
        self._watched: tuple[Lanes, Patience, Callable[[], bool]] | None = None
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def watch(self, lanes: Lanes, patience: Patience, loading: Callable[[], bool]) -> None:
        """Watch these lanes. loading: whether a pipeline is loading, which may take as long as a start or a request."""
        self._watched = lanes, patience, loading
        self._tell(Pulse(None, patience.seconds))

    def _beat(self) -> None:
        known: dict[int, tuple[int, float]] = {}
        loaded = 0.0
        while True:
            time.sleep(PULSE_SECONDS)
            if self._watched is None:
                self._tell(Pulse())
                continue
            lanes, patience, loading = self._watched
            loaded = loaded + PULSE_SECONDS if loading() else 0.0
            spared = 0 < loaded <= max(START_SECONDS, patience.most)
            stuck, any_drawn = None, any(engine.jobs for engine in lanes.engines)
            for number, engine in enumerate(lanes.engines):
                before, seconds = known.get(number, (-1, 0.0))
                # Polls are counted, because the clock goes on while sdflow is stopped by Ctrl-Z.
                waits = engine.busy and (bool(engine.jobs) or not any_drawn)  # else it waits for another lane's memory
                seconds = seconds + PULSE_SECONDS if waits and not spared and engine.progress == before else 0.0
                known[number] = engine.progress, seconds
                if seconds > patience.of(engine.jobs):
                    stuck = seconds
            self._tell(Pulse(stuck, patience.seconds))


class Watchdog:
    """Watches one worker for the server. give_up: kills the worker and receives the reason, on a separate thread.
    ended: set once the worker has exited."""

    def __init__(self, give_up: Callable[[Lost], None]) -> None:
        self._give_up, self._last = give_up, Pulse()
        self._heard, self.ended = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def hear(self, message: object) -> None:
        self._last = message if isinstance(message, Pulse) else self._last
        self._heard.set()

    def _watch(self) -> None:
        silent = 0.0
        while not self.ended.wait(PULSE_SECONDS):
            silent = 0.0 if self._heard.is_set() else silent + PULSE_SECONDS
            self._heard.clear()
            stuck = self._last.stuck
            if stuck is not None or silent > self._last.silence:
                what = f"no heartbeat for {silent:g} s" if stuck is None else f"no progress for {stuck:g} s"
                self._give_up(Lost("WorkerHung", f"{what}, so it was killed"))
                return
