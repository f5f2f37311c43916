"""What an image waits for while the engine goes on with others: values from the device, and files that the CPU writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any

from sdflow.runtime.drawing.waits import Compute, Fetch
from sdflow.runtime.sessions.place import Place

WAIT_SECONDS = 0.002
"""An engine that has nothing else to do looks so often whether there is."""

MOST_THREADS = 8


@dataclass(frozen=True)
class Pending:
    """done: whether it is. wait: until it is, or for a little while. result: what came of it; raises what the work raised."""

    done: Callable[[], bool]
    wait: Callable[[], object]
    result: Callable[[], Any]


def start(asked: Fetch | Compute) -> Pending:
    """Begin with it. Work of the processor is done in another thread. Copies are queued behind what makes the values; nobody but
    the engine asks the device whether they are done: while a graph is captured, another thread must not."""
    import torch

    if isinstance(asked, Compute):
        computing = _threads().submit(asked.work)
        return Pending(computing.done, lambda: wait([computing], WAIT_SECONDS), computing.result)
    stream = asked.place.stream
    if stream is None:
        return Pending(lambda: True, lambda: None, lambda: list(asked.values))
    with asked.place.current():
        found = [
            torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            for value in asked.values
        ]
        copied = torch.cuda.Event()
        copied.record(stream)
    # Memory that a device copies into is given back by the engine's thread, not by any that had it last.
    return Pending(copied.query, copied.synchronize, lambda: [value.clone() for value in found])


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
