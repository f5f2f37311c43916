"""Lanes: engines in parallel threads, each with its own sessions, that take from one queue.

On a CPU a small model does not use all cores: two images on one core each finish sooner than one after the other on
both. A GPU has one lane.
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
"""Polling interval while all jobs wait for something that is loading."""

RESIDENT_SECONDS = 0.5
"""Maximum age of the reported memory: reading it takes as long as several step messages."""

REST_SECONDS = 10.0
"""Delay after the last large image before its memory is released."""

IDLE_SECONDS = 5.0
"""Delay after the last image before the lane does work that would delay images."""

Tell = Callable[[Message], None]


@dataclass(eq=False)
class _Lane:
    """An engine in its thread.

    rest, idle: see `Lanes.add`. chores: calls to run in the lane's thread between steps.
    """

    engine: Engine
    rest: Callable[[], None]
    idle: Callable[[Callable[[], bool]], bool]
    chores: list[Callable[[], None]] = field(default_factory=list)


class Lanes:
    """The engines of a process. tell: receives messages; calls are serialized. share: see `Waiting`."""

    def __init__(self, tell: Tell, share: Callable[[Job], float] = lambda job: 0.0) -> None:
        self.waiting, self._share = Waiting(share), share
        self.submit = self.waiting.add
        self._tell, self._one_at_a_time = tell, threading.Lock()
        self._lanes: list[_Lane] = []
        self._ended = False
        self._process, self._memory, self._looked = psutil.Process(), 0, 0.0

    def add(
        self,
        make: Callable[[Waiting, Tell], Engine],
        rest: Callable[[], None] = lambda: None,
        idle: Callable[[Callable[[], bool]], bool] = lambda busy: True,
    ) -> None:
        """Add an engine. rest: releases what only large images need; called in its thread if none came for a while.
        idle: does work that would delay images, once there are none; takes whether to stop, and returns whether it is
        done."""
        self._lanes.append(_Lane(make(self.waiting, self._pass_on), rest, idle))

    @property
    def engines(self) -> list[Engine]:
        return [lane.engine for lane in self._lanes]

    def cancel(self, request: str) -> None:
        """Stop the images of a request; running ones stop at their next step."""
        with self.waiting.changed:
            for lane in self._lanes:
                lane.chores.append(partial(lane.engine.cancel, request))
            self.waiting.cancel(request)

    def do(self, chore: Callable[[], None]) -> None:
        """Run a call in the first lane's thread between two steps."""
        with self.waiting.changed:
            self._lanes[0].chores.append(chore)
        self.look_again()

    def show(self, wanted: Show) -> None:
        for engine in self.engines:
            engine.show(wanted)

    def look_again(self) -> None:
        """Wake the lanes: something that jobs wait for may be loaded."""
        with self.waiting.changed:
            self.waiting.changed.notify_all()

    def end(self) -> None:
        """Stop all lanes, so that `run` returns."""
        self._ended = True
        self.look_again()

    def run(self) -> None:
        """Run until `end`. The first engine runs in this thread, which a GPU's captured graphs belong to."""
        for lane in self._lanes[1:]:
            threading.Thread(target=self._run_or_die, args=(lane,), name="lane", daemon=True).start()
        self._run(self._lanes[0])

    def _run_or_die(self, lane: _Lane) -> None:
        """End the process on an unexpected error, as in the first lane; the server restarts it."""
        try:
            self._run(lane)
        except BaseException as error:  # noqa: BLE001  (else only the thread would end, and its images hang)
            log_error(error)
            os._exit(1)

    def _run(self, lane: _Lane) -> None:
        changed, engine, stuck, idle = self.waiting.changed, lane.engine, False, False
        large: float | None = None
        while True:
            with changed:
                if stuck:
                    changed.wait(WAIT_SECONDS)
                within = None if idle and large is None else IDLE_SECONDS
                wanted = changed.wait_for(lambda: self._ended or lane.chores or engine.busy, within)
                if self._ended:
                    return
                chores, lane.chores = lane.chores, []
            if not wanted and large is None and not self._busy():
                idle = lane.idle(self._busy)
            for chore in chores:
                chore()
            idle = idle and not engine.busy
            stuck = not engine.turn()  # it waits for something that is loading
            if any(map(self._share, engine.jobs)):
                large = time.monotonic()
            elif large is not None and time.monotonic() > large + REST_SECONDS:
                lane.rest()
                large = None

    def _busy(self) -> bool:
        return bool(self._ended or any(lane.engine.busy or lane.chores for lane in self._lanes))

    def _pass_on(self, message: Message) -> None:
        with self._one_at_a_time:
            if isinstance(message, Turned):
                if (now := time.monotonic()) >= self._looked + RESIDENT_SECONDS:
                    self._memory, self._looked = int(self._process.memory_info().rss), now
                drawing = sum(engine.drawing for engine in self.engines)
                message = replace(message, drawing=drawing, memory=self._memory)
            self._tell(message)
