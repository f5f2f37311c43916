"""What an engine's images are compared with, and how far they are from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sdflow.bench.engines import Engine
from sdflow.bench.result import Check
from sdflow.bench.sweep import SweepPoint
from sdflow.distance import psnr, relative_l2
from sdflow.tolerances import BENCH_FLOAT32, FLOAT16_RATIO

NEAR = "none: what is quantized says how far it is from PyTorch's image in float32"
APART = "none: an approximation says how far it is from the exact engine's image"

Drawn = Callable[[str], "Mapping[SweepPoint, np.ndarray]"]
"""PyTorch's images of every case, in the dtype of this name."""


@dataclass(frozen=True)
class Tolerance:
    """distance: the largest that is right. source: where that figure comes from."""

    distance: float
    source: str


FLOAT32_TOLERANCE = Tolerance(BENCH_FLOAT32, "fixed, for float32")


@dataclass(frozen=True)
class Yardstick:
    """What an engine's images of a case are compared with. reference: the right image; None: check nothing.
    approximates, quantized: as of `Measurement`."""

    reference: np.ndarray | None
    tolerance: Tolerance
    approximates: str = ""
    quantized: str = ""

    def check(self, drawn: np.ndarray) -> Check | None:
        """Images beside the right ones."""
        if self.reference is None:
            return None
        return Check(*distance(drawn, self.reference), self.tolerance.distance, self.tolerance.source)


def distance(drawn: np.ndarray, reference: np.ndarray) -> tuple[float, float | None]:
    """Relative L2 distance and PSNR in dB (of a peak of 1); infinite and 0 where there are values that are no numbers."""
    relative = relative_l2(drawn, reference)
    if math.isinf(relative):
        return relative, 0.0
    decibels = psnr(drawn, reference)
    return relative, None if math.isinf(decibels) else decibels


class References:
    """The right image of every case, PyTorch's in float32, and how far the others may be from it. Without any, nothing is
    checked."""

    def __init__(self) -> None:
        self._images: Mapping[SweepPoint, np.ndarray] = {}
        self._float16: dict[SweepPoint, Tolerance] = {}

    def draw(self, drawn: Drawn, *, float16: bool, say: Callable[[str], None]) -> None:
        """float16: also draw with PyTorch in float16, whose distance limits that of float16 engines."""
        say("drawing the reference: PyTorch, float32")
        self._images = drawn("float32")
        if float16:
            say("drawing with PyTorch in float16: what float16 costs")
            for case, images in drawn("float16").items():
                found = distance(images, self._images[case])[0]
                source = f"{FLOAT16_RATIO} x the distance of PyTorch's float16, {found:.2e}"
                self._float16[case] = Tolerance(max(FLOAT16_RATIO * found, BENCH_FLOAT32), source)

    def yardstick(
        self, engine: Engine, dtype: str, quantized: str, case: SweepPoint, exact: np.ndarray | None
    ) -> Yardstick:
        """What an engine is compared with. exact: the image of the engine that it approximates; None without one, or where that
        failed. A quantized one is compared with PyTorch's image, without a limit."""
        if engine.exact:
            return Yardstick(exact if self._images else None, Tolerance(math.inf, APART), approximates=engine.exact)
        reference = self._images.get(case)
        if quantized:
            return Yardstick(reference, Tolerance(math.inf, NEAR), quantized=quantized)
        tolerance = self._float16.get(case, FLOAT32_TOLERANCE) if dtype == "float16" else FLOAT32_TOLERANCE
        return Yardstick(reference, tolerance)
