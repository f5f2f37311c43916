"""The inputs common to all engines of a run: swept sizes, and fixed settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from sdflow.families.shared.latents import Latents
from sdflow.runtime.ensemble import Ensemble, hand_over
from sdflow.runtime.pipeline import Pipeline

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SweepPoint:
    """One point of the sweep. batch: images per call. height, width: pixels."""

    batch: int
    height: int
    width: int
    steps: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.width}x{self.height}, {self.steps} steps"


@dataclass(frozen=True)
class Settings:
    """Settings common to all cases. seed: of the latents. scheduler: a name of `SCHEDULERS`; None: the pipeline's own.

    warmup: uncounted images after the first. rounds: number of turns per engine. threads: of the CPU, for every engine;
    None: each engine's default. tuning: whether to use the choice of `sdflow tune`. references: number of reference
    images.
    """

    prompt: str = "a photo of an astronaut riding a horse on mars"
    negative_prompt: str | None = None
    guidance_scale: float = 7.5
    seed: int = 0
    scheduler: str | None = None
    warmup: int = 1
    rounds: int = 5
    threads: int | None = None
    tuning: bool = True
    references: int = 0


def sweep(batches: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> Iterator[SweepPoint]:
    """Every combination; a size applies to both sides."""
    for batch, size, count in product(batches, sizes, steps):
        yield SweepPoint(batch, size, size, count)


def latents(case: SweepPoint, seed: int, what: Latents) -> torch.Tensor:
    """Standard normal float32 (batch, channels, height / scale, width / scale), drawn on the CPU."""
    import torch

    shape = (case.batch, what.channels, case.height // what.scale, case.width // what.scale)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call_options(pipeline: Pipeline | Ensemble, case: SweepPoint, settings: Settings) -> dict[str, Any]:
    """The call arguments of sdflow's pipeline for a case, without the initial latents or their generator."""
    from sdflow.samples.canvas import canvas, references

    base = pipeline.base if isinstance(pipeline, Ensemble) else pipeline
    return {
        "prompt": [settings.prompt] * case.batch,
        **canvas(base.task, case.height, case.width),
        **({"references": shown} if (shown := references(settings.references, case.height, case.width)) else {}),
        "whole": True,
        "negative_prompt": settings.negative_prompt,
        "height": case.height,
        "width": case.width,
        "num_inference_steps": case.steps,
        "guidance_scale": settings.guidance_scale,
        **({} if base is pipeline else {"refiner_start": hand_over(case.steps)}),
    }
