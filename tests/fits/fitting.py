"""Pipelines of shipped workflows and the memory that they are estimated to take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sdflow.config import load_workflow
from sdflow.config.workflow import PipelineSpec
from sdflow.disk.shipped import shipped_workflow
from sdflow.fits.estimate import MemoryNeed, memory_need
from sdflow.passes.registry import catalog
from sdflow.sources import Checkpoint, PlainDigests, open_checkpoint

ROOT = Path(__file__).parents[2]
FULL_SIZE = {
    "sd15": "sd15",
    "sdxl": "sdxl",
    "sd35_medium": "sd35-medium",
    "flux2_klein": "flux2-klein-4b",
    "z_image_turbo": "z-image-turbo",
    "flux1_schnell": "flux1-schnell",
}
"""Shipped workflow -> its architecture."""


def planned(base: str, target: str = "cuda", overrides: Sequence[str] = ()) -> tuple[PipelineSpec, Checkpoint]:
    """The pipeline of a shipped workflow, or of a file in workflows/, and its checkpoint."""
    return _planned(base, target, tuple(overrides))


@cache
def _planned(base: str, target: str, overrides: tuple[str, ...]) -> tuple[PipelineSpec, Checkpoint]:
    path = shipped_workflow(f"base/{base}.yaml") or ROOT / f"workflows/{base}.yaml"
    (pipeline,) = load_workflow(path, catalog=catalog(), overrides=overrides, targets=[target]).pipelines
    return pipeline, open_checkpoint(pipeline.model, digests=PlainDigests(), download=False, **pipeline.opening)


def full_size(base: str, target: str = "cuda", overrides: Sequence[str] = ()) -> tuple[PipelineSpec, Checkpoint]:
    """The same, of random weights at full size, of which none is made."""
    architecture = FULL_SIZE[base.removesuffix("_cuda").removesuffix("_float8")]
    return planned(base, target, [f"model=synthetic:{architecture}", *overrides])


def need(base: str, *overrides: str) -> MemoryNeed:
    """What one takes on CUDA."""
    return memory_need(*full_size(base, overrides=overrides))
