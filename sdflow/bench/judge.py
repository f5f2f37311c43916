"""Compare engines' images with references."""

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

NEAR = "none: the distance of a quantized pipeline from PyTorch's float32 image is only reported"
APART = "none: the distance of an approximation from the exact engine's image is only reported"

Drawn = Callable[[str], "Mapping[SweepPoint, np.ndarray]"]
"""PyTorch's images of every case, in the dtype of this name."""


@dataclass(frozen=True)
class Tolerance:
    """How far an image may be from the reference.

    distance: the largest right one. source: of that figure.
    """

    distance: float
    source: str


FLOAT32_TOLERANCE = Tolerance(BENCH_FLOAT32, "fixed, for float32")


@dataclass(frozen=True)
class Yardstick:
    """The comparison for an engine's images of a case. reference: the right image; None: no check. approximates,
    quantized: see `Measurement`."""

    reference: np.ndarray | None
    tolerance: Tolerance
    approximates: str = ""
    quantized: str = ""

    def check(self, drawn: np.ndarray) -> Check | None:
        """Compare images with the right ones."""
        if self.reference is None:
            return None
        return Check(*distance(drawn, self.reference), self.tolerance.distance, self.tolerance.source)


def distance(drawn: np.ndarray, reference: np.ndarray) -> tuple[float, float | None]:
    """Relative L2 distance and PSNR in dB (peak 1); infinite and 0 if values are not finite."""
    relative = relative_l2(drawn, reference)
    if math.isinf(relative):
        return relative, 0.0
    decibels = psnr(drawn, reference)
    return relative, None if math.isinf(decibels) else decibels


class References:
    """The right image of every case, PyTorch's in float32, with tolerances. Empty ones check nothing."""

    def __init__(self) -> None:
        self._images: Mapping[SweepPoint, np.ndarray] = {}
        self._float16: dict[SweepPoint, Tolerance] = {}

    def draw(self, drawn: Drawn, *, float16: bool, say: Callable[[str], None]) -> None:
        """float16: also generate with PyTorch in float16, whose distance limits that of float16 engines."""
        say("drawing the reference: PyTorch, float32")
        self._images = drawn("float32")
        if float16:
            say("drawing with PyTorch in float16, for the tolerance")
            for case, images in drawn("float16").items():
                found = distance(images, self._images[case])[0]
                source = f"{FLOAT16_RATIO} x the distance of PyTorch's float16, {found:.2e}"
                self._float16[case] = Tolerance(max(FLOAT16_RATIO * found, BENCH_FLOAT32), source)

    def yardstick(
        self, engine: Engine, dtype: str, quantized: str, case: SweepPoint, exact: np.ndarray | None
    ) -> Yardstick:
        """The comparison for an engine. exact: the image of the engine that it approximates; None if there is none, or
        it failed. A quantized engine is compared with PyTorch's image, without a limit."""
        if engine.exact:
            return Yardstick(exact if self._images else None, Tolerance(math.inf, APART), approximates=engine.exact)
        reference = self._images.get(case)
        if quantized:
            return Yardstick(reference, Tolerance(math.inf, NEAR), quantized=quantized)
        tolerance = self._float16.get(case, FLOAT32_TOLERANCE) if dtype == "float16" else FLOAT32_TOLERANCE
        return Yardstick(reference, tolerance)
