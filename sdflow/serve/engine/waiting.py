"""The queue of images, in order of arrival, shared by the lanes.

Images larger than the model's own size share the memory measured at startup: one starts when its share fits or no other
large one is running. Smaller images overtake it meanwhile; other large ones do not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from sdflow.serve.jobs import Job

SIZES = (1, 2, 4, 8)
"""Batch sizes to try. They are few because each needs its own session, on CUDA with a captured graph."""

GAIN = 0.95
"""A larger batch must take at most this fraction of the best smaller batch's time per image."""


class Waiting:
    """Thread-safe queue. changed: notified on every change. share: fraction of memory that an image takes."""

    def __init__(self, share: Callable[[Job], float] = lambda job: 0.0) -> None:
        self._jobs: list[Job] = []
        self._share = share
        self._taken: list[Job] = []
        self.changed = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> Sequence[Job]:
        """Queued jobs, oldest first."""
        with self.changed:
            return tuple(self._jobs)

    @property
    def pipelines(self) -> frozenset[str]:
        """Pipelines with running images."""
        with self.changed:
            return frozenset(job.pipeline for job in self._taken)

    def add(self, job: Job) -> None:
        with self.changed:
            self._jobs.append(job)
            self.changed.notify_all()

    def cancel(self, request: str) -> None:
        with self.changed:
            self._jobs = [job for job in self._jobs if job.request != request]
            self.changed.notify_all()

    def take(self, choose: Callable[[Sequence[Job]], Job | None]) -> Job | None:
        """Remove and return the job that `choose` picks, or None if none fits in memory. Holds the lock meanwhile."""
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
        """Record that a job is no longer running."""
        with self.changed:
            if job in self._taken:
                self._taken.remove(job)


def next_batch(images: int, seconds: Mapping[int, float]) -> int:
    """Return the batch size with the least time per image for the oldest of this many images. The rest wait: alternating
    would delay all images and speed up none. seconds: of one run, by batch size."""
    return min(seconds, key=lambda size: (seconds[size] / min(size, images), size))


def worthwhile_sizes(measure: Callable[[int], float | None]) -> dict[int, float]:
    """Return the seconds of a run for each worthwhile batch size: 1, and each larger size that saves time per image.
    measure: returns the seconds of a size, or None if it does not fit in memory; called until a size does not pay."""
    kept: dict[int, float] = {}
    for size in SIZES:
        seconds = measure(size)
        if seconds is None or (kept and seconds / size > GAIN * min(taken / of for of, taken in kept.items())):
            break
        kept[size] = seconds
    return kept
