"""What an image waits for that is no step: values on their way from the device, and work of the processor such as a PNG file.

The engine goes on with other images meanwhile: it resumes the call when that is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sdflow.runtime.drawing.host import Host, Result
from sdflow.runtime.sessions.place import Place

if TYPE_CHECKING:
    import torch

WAIT_SECONDS = 0.002
"""An engine that has nothing else to do looks so often whether there is."""

MOST_THREADS = 8


@dataclass(frozen=True)
class Elsewhere:
    """done: whether it is. wait: until it is, or for a little while. The call's thread knows where the result will be."""

    done: Callable[[], bool]
    wait: Callable[[], object]


class PausingHost(Host):
    """In the place of a pipeline's own. ask: pauses the call until what is asked for is done."""

    def __init__(self, ask: Callable[[Elsewhere], object], place: Place) -> None:
        self._ask, self._place = ask, place

    def fetch(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies are queued behind what makes the values. Nobody but the engine asks the device whether they are done: while
        a graph is captured, another thread must not."""
        import torch

        stream = self._place.stream
        if stream is None:
            return list(values)
        with self._place.current():
            found = [
                torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
                for value in values
            ]
            copied = torch.cuda.Event()
            copied.record(stream)
        self._ask(Elsewhere(copied.query, copied.synchronize))
        # Memory that a device copies into is given back by this thread, not by any that had it last.
        return [value.clone() for value in found]

    def compute(self, work: Callable[[], Result]) -> Result:
        """In another thread."""
        computing: Future[Result] = _threads().submit(work)
        self._ask(Elsewhere(computing.done, lambda: wait([computing], WAIT_SECONDS)))
        return computing.result()


class OneAhead:
    """Keeps what is queued on a device short: a run is computed while the next is queued, and no third. So a new image waits for
    little, and the device for nothing."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._before: Any = None

    def queued(self) -> None:
        """A run was: wait for the one before."""
        import torch

        if self._place.stream is None:
            return
        event = torch.cuda.Event()
        event.record(self._place.stream)
        before, self._before = self._before, event
        if before is not None:
            before.synchronize()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "elsewhere")
