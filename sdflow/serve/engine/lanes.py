"""Engines side by side, each in a thread with sessions of its own, that take from one queue.

On a CPU a small model does not keep all cores busy: two images, each drawn by one core, are finished before one is drawn by
both and then the other. How many lanes there are, a measurement says (`sdflow.serve.engine.loading`). A GPU has one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import psutil

from sdflow.serve.engine.engine import Engine
from sdflow.serve.engine.waiting import Waiting
from sdflow.serve.jobs import Job, Message, Show, Turned
from sdflow.serve.log import log_error

WAIT_SECONDS = 0.005
"""Between two looks whether what the only jobs wait for is there."""

RESIDENT_SECONDS = 0.5
"""How old the memory that is told may be: looking takes as long as several steps' messages."""

REST_SECONDS = 10.0
"""After the last large image, the memory that it took goes back."""

Tell = Callable[[Message], None]


@dataclass(eq=False)
class _Lane:
    """rest: gives back what only large images need. chores: to do between two steps, in its thread."""

    engine: Engine
    rest: Callable[[], None]
    chores: list[Callable[[], None]] = field(default_factory=list)


class Lanes:
    """The engines of a process. tell: receives what happens; calls are serialized. share: as of `Waiting`."""

    def __init__(self, tell: Tell, share: Callable[[Job], float] = lambda job: 0.0) -> None:
        self.waiting, self._share = Waiting(share), share
        self.submit = self.waiting.add
        self._tell, self._one_at_a_time = tell, threading.Lock()
        self._lanes: list[_Lane] = []
        self._ended = self._running = False
        self._process, self._memory, self._looked = psutil.Process(), 0, 0.0

    def add(self, make: Callable[[Waiting, Tell], Engine], rest: Callable[[], None] = lambda: None) -> None:
        """One more engine. rest: gives back what only large images need, in the lane's thread, some time after the last one."""
        self._lanes.append(lane := _Lane(make(self.waiting, self._pass_on), rest))
        if self._running:
            self._start(lane)

    def replace(self, add: Callable[[], None]) -> None:
        """Those that `add` adds take the place of those that are there, which finish what they draw. On a CPU only."""
        with self.waiting.changed:
            for lane in self._lanes:
                lane.engine.retired = True
            add()
        self.look_again()

    @property
    def engines(self) -> list[Engine]:
        return [lane.engine for lane in self._lanes]

    def cancel(self, request: str) -> None:
        """Draw no more of a request; what is being drawn of it ends at its next step."""
        with self.waiting.changed:
            for lane in self._lanes:
                lane.chores.append(partial(lane.engine.cancel, request))
            self.waiting.cancel(request)

    def do(self, chore: Callable[[], None]) -> None:
        """In the thread of the first lane, between two steps."""
        with self.waiting.changed:
            self._lanes[0].chores.append(chore)
        self.look_again()

    def show(self, wanted: Show) -> None:
        """Of a request, what is being drawn."""
        for engine in self.engines:
            engine.show(wanted)

    def look_again(self) -> None:
        """What a job waits for may be there now."""
        with self.waiting.changed:
            self.waiting.changed.notify_all()

    def end(self) -> None:
        """Draw no more at all: `run` returns."""
        self._ended = True
        self.look_again()

    def run(self) -> None:
        """Draw until the end. The first engine runs in this thread: a GPU's captured graphs belong to the thread that warmed
        up."""
        self._running = True
        for lane in self._lanes[1:]:
            self._start(lane)
        self._run(self._lanes[0])
        with self.waiting.changed:  # others may have taken its place
            self.waiting.changed.wait_for(lambda: self._ended)

    def _start(self, lane: _Lane) -> None:
        threading.Thread(target=self._run_or_die, args=(lane,), name="lane", daemon=True).start()

    def _run_or_die(self, lane: _Lane) -> None:
        """What nobody foresaw ends the process, as it does in the first lane: it is started again."""
        try:
            self._run(lane)
        except BaseException as error:  # noqa: BLE001  (a thread would end alone, and its images never)
            log_error(error)
            os._exit(1)

    def _run(self, lane: _Lane) -> None:
        changed, engine, stuck = self.waiting.changed, lane.engine, False
        large: float | None = None
        while True:
            with changed:
                if stuck:
                    changed.wait(WAIT_SECONDS)
                within = None if large is None else REST_SECONDS
                changed.wait_for(lambda: self._ended or engine.retired or lane.chores or engine.busy, within)
                if engine.retired and not engine.jobs and not lane.chores:
                    self._lanes.remove(lane)
                    return
                if self._ended:
                    return
                chores, lane.chores = lane.chores, []
            for chore in chores:
                chore()
            stuck = not engine.turn()  # what it waits for is being made
            if any(map(self._share, engine.jobs)):
                large = time.monotonic()
            elif large is not None and time.monotonic() > large + REST_SECONDS:
                lane.rest()
                large = None

    def _pass_on(self, message: Message) -> None:
        with self._one_at_a_time:
            if isinstance(message, Turned):
                if (now := time.monotonic()) >= self._looked + RESIDENT_SECONDS:
                    self._memory, self._looked = int(self._process.memory_info().rss), now
                drawing = sum(engine.drawing for engine in self.engines)
                message = replace(message, drawing=drawing, memory=self._memory)
            self._tell(message)
