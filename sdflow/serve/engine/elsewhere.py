"""Work that runs while the engine continues with other images: copies from the device, and CPU tasks such as encoding."""

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
"""Polling interval of an idle engine."""

MOST_THREADS = 8


@dataclass(frozen=True)
class Pending:
    """Pending work. wait: blocks until it is done or for a moment. result: returns the result or raises the error."""

    done: Callable[[], bool]
    wait: Callable[[], object]
    result: Callable[[], Any]


def start(asked: Fetch | Compute) -> Pending:
    """Start the work: CPU tasks in a thread pool, copies on the device's stream behind the runs that produce the
    values. Only the engine's thread may query the device: others must not during a graph capture."""
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
    # Cloned so that pinned memory is always freed by the engine's thread.
    return Pending(copied.query, copied.synchronize, lambda: [value.clone() for value in found])


class OneAhead:
    """Limits the device queue to one running and one queued run: new images start soon and the device never idles."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._before: Any = None

    def queued(self) -> None:
        """Wait for the previous run after a new one was queued."""
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
