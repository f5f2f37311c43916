"""Run several threads over one set of weights that is read once for all.

One thread runs at a time. A run pauses before each part whose weights are read; the one furthest behind continues. So
all runs pass a part before the next part is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Semaphore, Thread, get_ident
from typing import Any


class _Ended(BaseException):
    """Raised in a run to stop it after another one failed."""


@dataclass
class Run:
    """A run. passed: number of parts that it has passed. result: None until it has ended."""

    work: Callable[[], Any]
    passed: int = 0
    ready: Callable[[], bool] | None = None
    go: Semaphore = field(default_factory=lambda: Semaphore(0))
    thread: Thread | None = None
    ended: bool = False
    result: Any = None
    error: BaseException | None = None


class Turns:
    """Runs that take turns: `start` them, then `finish`. Both are for the creating thread; runs may call `start`,
    too."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._of_thread: dict[int, Run] = {}
        self._back = Semaphore(0)
        self._failed = False

    def start(self, work: Callable[[], Any]) -> Run:
        """Add a run, level with the most advanced one. It begins when its turn comes."""
        run = Run(work, max((each.passed for each in self._runs), default=0))
        run.thread = Thread(target=self._work, args=(run,), daemon=True)
        self._runs.append(run)
        return run

    def pause(self) -> None:
        """Called by a run before each part: lets the others catch up."""
        if (run := self._of_thread.get(get_ident())) is not None:
            self._let_go(run)
            run.passed += 1

    def wait(self, ready: Callable[[], bool]) -> None:
        """Called by a run that needs another one's result. It then continues level with the most advanced one."""
        run = self._of_thread[get_ident()]
        if not ready():
            run.ready = ready
            self._let_go(run)
            run.passed = max(each.passed for each in self._runs)

    def finish(self) -> None:
        """Run all to the end. Raises the error of a failed run, after stopping the others."""
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
            raise RuntimeError("all runs are waiting for one another")

    def _let_go(self, run: Run) -> None:
        self._back.release()
        run.go.acquire()
        if self._failed:
            raise _Ended

    def _work(self, run: Run) -> None:
        import torch

        self._of_thread[get_ident()] = run
        try:
            with torch.no_grad():  # the setting is per thread
                run.result = run.work()
        except BaseException as error:  # noqa: BLE001 - raised again by `finish`
            run.error = error
        finally:
            run.ended = True
            del self._of_thread[get_ident()]
            self._back.release()
