"""Time one engine: whole images, their stages, memory and energy, with every image checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from sdflow.bench.device import Device, Memory
from sdflow.bench.draw_functions import Draw
from sdflow.bench.judge import Yardstick
from sdflow.bench.latency import summarize
from sdflow.bench.result import Check, Measurement
from sdflow.bench.sweep import SweepPoint

SETTLE_SECONDS = 0.2
"""Pause between turns of engines on a CPU, until the previous one's threads stop spinning."""

STAGES = ("text", "step", "decoder")


class Turns:
    """An engine's turns in one case; the caller schedules them."""

    def __init__(self, draw: Draw, case: SweepPoint, device: Device, yardstick: Yardstick) -> None:
        self.drawn: np.ndarray | None = None
        self._draw, self._case, self._device, self._yardstick = draw, case, device, yardstick
        self._worst: Check | None = None
        self._images: list[float] = []
        self._stages: dict[str, list[float]] = {name: [] for name in STAGES}
        self._memories: list[Memory] = []
        self._energy: float | None = 0.0
        self.first_ms = 0.0

    def first(self) -> None:
        """Generate the first and second image, recording memory."""
        for index in range(2):
            with self._device.peak_memory() as peak:
                took = self._timed(lambda: self._draw(self._case, None))
            self._memories.append(peak[0])
            if index == 0:
                self.first_ms = took

    def warm(self) -> None:
        self._timed(lambda: self._draw(self._case, None))

    def counted(self) -> None:
        """Run a counted turn; on a GPU, stages have a separate image."""
        if self._device.kind == "cpu":
            time.sleep(SETTLE_SECONDS)
            self._images.append(self._staged())
            return
        before = self._device.energy()
        self._images.append(self._timed(lambda: self._draw(self._case, None)))
        after = self._device.energy()
        used = None if before is None or after is None else after - before
        self._energy = None if used is None or self._energy is None else self._energy + used
        self._staged()

    def result(self, warmup: int) -> Measurement:
        """The measurement. Raises ValueError if nothing was counted."""
        image = summarize(self.first_ms, warmup, self._images)
        stages = {name: summarize(times[0], 0, times) for name, times in self._stages.items() if times}
        images = len(self._images) * self._case.batch
        known = self._device.kind != "cpu" and self._energy is not None
        return Measurement(
            first_ms=self.first_ms,
            compile_ms=max(0.0, self.first_ms - image.median_ms),
            image=image,
            stages=stages,
            images_per_second=1000 * self._case.batch / statistics.median(self._images),
            memory=self._memories[0],
            memory_second=self._memories[1],
            energy=self._energy / images if known and self._energy is not None else None,
            check=self._worst,
            approximates=self._yardstick.approximates,
            quantized=self._yardstick.quantized,
        )

    def _timed(self, draw: Callable[[], np.ndarray]) -> float:
        """Milliseconds until the images are ready; they are compared afterwards."""
        self._device.wait()
        begun = time.perf_counter()
        drawn = draw()
        self._device.wait()
        took = 1e3 * (time.perf_counter() - begun)
        self.drawn = drawn
        found = self._yardstick.check(drawn)
        if found is not None:
            self._worst = found if self._worst is None else max(self._worst, found, key=lambda each: each.distance)
        return took

    def _staged(self) -> float:
        marks: list[float] = []

        def mark() -> None:
            self._device.wait()
            marks.append(time.perf_counter())

        self._device.wait()
        begun = time.perf_counter()
        took = self._timed(lambda: self._draw(self._case, mark))
        end = begun + took / 1e3
        text, *steps = marks
        self._stages["text"].append(1e3 * (text - begun))
        self._stages["step"] += [1e3 * (after - before) for before, after in zip(marks, steps, strict=False)]
        self._stages["decoder"].append(1e3 * (end - marks[-1]))
        return took
