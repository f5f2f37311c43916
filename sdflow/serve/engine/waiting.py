"""The images that wait to be drawn, in the order in which they came. Several lanes may take from it.

Those that are larger than the model's own size share the memory that is measured at the start: one is taken when there is room
beside those that are being drawn, or none is. Smaller ones overtake one that waits for that, other large ones do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from sdflow.serve.jobs import Job

SIZES = (1, 2, 4, 8)
"""Images of a batch that are tried. Each is a session of its own, on CUDA with a captured graph, so they are few."""

GAIN = 0.95
"""A larger batch must take at most this part of the time for an image that the best smaller one takes."""


class Waiting:
    """For several threads. changed: notified when something came or went. share: the part of the memory that an image takes."""

    def __init__(self, share: Callable[[Job], float] = lambda job: 0.0) -> None:
        self._jobs: list[Job] = []
        self._share = share
        self._taken: list[Job] = []
        self.drawn, self.last = 0, time.monotonic()
        """How many were taken and left, and when the last one did."""
        self.changed = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> Sequence[Job]:
        """What waits now, the oldest first."""
        with self.changed:
            return tuple(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether something waits or is drawn."""
        return bool(self._jobs or self._taken)

    @property
    def pipelines(self) -> frozenset[str]:
        """Whose images are drawn now."""
        with self.changed:
            return frozenset(job.pipeline for job in self._taken)

    def add(self, job: Job) -> None:
        with self.changed:
            self._jobs.append(job)
            self.changed.notify_all()

    def cancel(self, request: str) -> None:
        """Remove the jobs of this request."""
        with self.changed:
            self._jobs = [job for job in self._jobs if job.request != request]
            self.changed.notify_all()

    def take(self, choose: Callable[[Sequence[Job]], Job | None]) -> Job | None:
        """What is chosen of it, which waits no more; None where there is no room for it. Nobody else takes anything meanwhile."""
        with self.changed:
            chosen = choose(self._jobs)
            if chosen is not None and not self._fits(chosen):
                chosen = choose([job for job in self._jobs if not self._share(job)])
            if chosen is None:
                return None
            self._taken.append(chosen)
            self._jobs.remove(chosen)
            return chosen

    def _fits(self, job: Job) -> bool:
        share = self._share(job)
        others = sum(map(self._share, self._taken))
        return not (share and others) or share + others <= 1

    def release(self, job: Job) -> None:
        """One that was taken is drawn no more."""
        with self.changed:
            if job in self._taken:
                self._taken.remove(job)
                self.drawn, self.last = self.drawn + 1, time.monotonic()


def next_batch(images: int, seconds: Mapping[int, float]) -> int:
    """The size of the batch that the oldest of so many images are drawn in next: the one that takes least time for each. Those
    that have no place wait until an older one is done; in turns of their own, all would be done later, and none earlier.

    seconds: of one run, by size of the batch.
    """
    return min(seconds, key=lambda size: (seconds[size] / min(size, images), size))


def worthwhile_sizes(measure: Callable[[int], float | None]) -> dict[int, float]:
    """Seconds of a run for each size of a batch that is worth it: the first is 1, and each larger saves time. measure: seconds
    of a run of this size; None where there is no room for it. It is not asked beyond the first that does not pay."""
    kept: dict[int, float] = {}
    for size in SIZES:
        seconds = measure(size)
        if seconds is None or (kept and seconds / size > GAIN * min(taken / of for of, taken in kept.items())):
            break
        kept[size] = seconds
    return kept
