"""Runs over one set of weights that is read once for all of them.

Each run is a thread, and one thread runs at a time. A run pauses before each part whose weights are read; the one that is behind
goes on. So all pass a part before any passes the next, which is read only then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Semaphore, Thread, get_ident
from typing import Any


class _Ended(BaseException):
    """Raised in a run that is not to go on, as another has failed."""


@dataclass
class Run:
    """A run. passed: how many parts it has passed. result: None until it has ended."""

    work: Callable[[], Any]
    passed: int = 0
    ready: Callable[[], bool] | None = None
    go: Semaphore = field(default_factory=lambda: Semaphore(0))
    thread: Thread | None = None
    ended: bool = False
    result: Any = None
    error: BaseException | None = None


class Turns:
    """Runs that take turns. `start` them, then `finish`; both belong to the thread that made this, `start` to a run's as well."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._of_thread: dict[int, Run] = {}
        self._back = Semaphore(0)
        self._failed = False

    def start(self, work: Callable[[], Any]) -> Run:
        """A further run, as far as the one in front. It begins when its turn comes."""
        run = Run(work, max((each.passed for each in self._runs), default=0))
        run.thread = Thread(target=self._work, args=(run,), daemon=True)
        self._runs.append(run)
        return run

    def pause(self) -> None:
        """Called by a run in front of each part: the others come as far first."""
        if (run := self._of_thread.get(get_ident())) is not None:
            self._let_go(run)
            run.passed += 1

    def wait(self, ready: Callable[[], bool]) -> None:
        """Called by a run: what it needs next is made by another. It goes on beside the one in front."""
        run = self._of_thread[get_ident()]
        if not ready():
            run.ready = ready
            self._let_go(run)
            run.passed = max(each.passed for each in self._runs)

    def finish(self) -> None:
        """Let all runs end. Raises what one of them has raised; the others then end where they are."""
        stuck = False
        while alive := [run for run in self._runs if not run.ended]:
            waiting = [run for run in alive if run.ready is not None and (self._failed or run.ready())]
            moving = [run for run in alive if run.ready is None]
            if not waiting and not moving:
                self._failed = stuck = True
                continue
            run = (waiting or [min(moving, key=lambda each: each.passed)])[0]
            run.ready = None
            if run.thread is not None and run.thread.ident is None:
                run.thread.start()
            else:
                run.go.release()
            self._back.acquire()
            self._failed = self._failed or run.error is not None
        for run in self._runs:
            if run.error is not None and not isinstance(run.error, _Ended):
                raise run.error
        if stuck:
            raise RuntimeError("runs wait for what none of them makes")

    def _let_go(self, run: Run) -> None:
        self._back.release()
        run.go.acquire()
        if self._failed:
            raise _Ended

    def _work(self, run: Run) -> None:
        import torch

        self._of_thread[get_ident()] = run
        try:
            with torch.no_grad():  # what another thread has set does not hold here
                run.result = run.work()
        except BaseException as error:  # noqa: BLE001 - raised again by `finish`
            run.error = error
        finally:
            run.ended = True
            del self._of_thread[get_ident()]
            self._back.release()
