"""Queue time estimates, from the steps left and the step times of finished images."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from sdflow.serve.jobs import Drawn, Job

RECENT = 5
"""Number of recent images for the median, because the first image of a size waits for its sessions."""


class QueueSeconds:
    """Step times by pipeline and approximate size, as the rounded log2 of the pixels."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], deque[float]] = {}
        self._rests: dict[tuple[str, int], deque[float]] = {}
        self._lanes = 1

    def start(self, name: str, found: Mapping[str, Any]) -> None:
        """Record what was measured when a pipeline was loaded."""
        self._lanes = found.get("lanes", 1)
        if seconds := found.get("batch_seconds"):
            best = min(taken / int(size) for size, taken in seconds.items())
            self._steps[name, _size(found["pixels"])] = deque([best], RECENT)

    def note(self, job: Job, drawn: Drawn) -> None:
        key, seconds = (job.pipeline, _size(job.pixels)), drawn.seconds
        if "steps" in seconds:
            self._steps.setdefault(key, deque(maxlen=RECENT)).append(seconds["steps"] / job.steps)
            self._rests.setdefault(key, deque(maxlen=RECENT)).append(seconds["begin"] + seconds["end"])

    def of(self, job: Job, left: float) -> float:
        """Return the seconds that an image still takes. left: fraction of its steps."""
        return job.steps * left * self._known(self._steps, job, 1.0) + self._known(self._rests, job, 0.0)

    def until(self, ended: int, drawing: Sequence[float], waiting: Sequence[float]) -> int:
        """Return the seconds until this many images finish, rounded up. drawing: seconds of each running image; these
        share the device. waiting: seconds of each queued image."""
        if ended <= len(drawing):
            last = sorted(drawing)[ended - 1]
            seconds = sum(min(each, last) for each in drawing)
        else:
            seconds = sum(drawing) + sum(waiting[: ended - len(drawing)])
        return max(1, math.ceil(seconds / self._lanes))

    @staticmethod
    def _known(known: Mapping[tuple[str, int], Sequence[float]], job: Job, otherwise: float) -> float:
        """Return the median for this size, or scale that of the nearest size by the number of pixels."""
        size = _size(job.pixels)
        sizes = [each for pipeline, each in known if pipeline == job.pipeline]
        if not sizes:
            return otherwise
        nearest = min(sizes, key=lambda each: abs(each - size))
        return float(median(known[job.pipeline, nearest]) * 2.0 ** (size - nearest))


def _size(pixels: int) -> int:
    return round(math.log2(max(pixels, 1)))
