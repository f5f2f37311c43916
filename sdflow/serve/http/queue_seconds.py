"""How long the queue takes, from the steps that are left and the time that steps of finished images took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdflow.serve.jobs import Drawn, Job

LAST = 0.2
"""How much the last image counts beside all before it."""


@dataclass
class QueueSeconds:
    """step: device seconds of a megapixel's step, by pipeline. rest: seconds of an image beside its steps. lanes: that draw side
    by side."""

    step: dict[str, float] = field(default_factory=dict)
    rest: dict[str, float] = field(default_factory=dict)
    lanes: int = 1

    def start(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """With what was measured when the pipelines were loaded."""
        for name, each in found.items():
            self.lanes = each.get("lanes", 1)
            if seconds := each.get("batch_seconds"):
                best = min(taken / int(size) for size, taken in seconds.items())
                self.step[name] = 1e6 * best / each["pixels"]

    def note(self, job: Job, drawn: Drawn) -> None:
        """An image is finished."""
        steps = drawn.seconds.get("steps", 0.0) / max(job.work, 1e-9)
        rest = drawn.seconds.get("begin", 0.0) + drawn.seconds.get("end", 0.0)
        for known, found in ((self.step, steps), (self.rest, rest)):
            known[job.pipeline] = found + (1 - LAST) * (known.get(job.pipeline, found) - found)

    def of(self, job: Job, left: float) -> float:
        """Of an image, of whose steps this part is left."""
        return self.step.get(job.pipeline, 1.0) * job.work * left + self.rest.get(job.pipeline, 0.0)

    def until(self, ended: int, drawing: Sequence[float], waiting: Sequence[float]) -> int:
        """Seconds until so many images are finished, rounded up. drawing: what each image that shares the device takes; waiting:
        those behind them."""
        if ended <= len(drawing):
            last = sorted(drawing)[ended - 1]
            seconds = sum(min(each, last) for each in drawing)
        else:
            seconds = sum(drawing) + sum(waiting[: ended - len(drawing)])
        return max(1, math.ceil(seconds / self.lanes))
