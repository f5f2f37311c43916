"""What the tests have in common that hold images to diffusers' own pipelines: small models, images to draw from, a tolerance."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from converted import Converted
from PIL import Image

from sdflow.build.assemble import assemble
from sdflow.manifest import Origin
from sdflow.sources import Checkpoint

TOLERANCE = 1e-4  # of pixel values in [0, 1]
SIZE = 64
PROMPT = "a horse on the moon"
KINDS = {"sd15-tiny": "StableDiffusion", "sdxl-tiny": "StableDiffusionXL"}
"""How the names of diffusers' pipelines begin."""


def put_together(checkpoint: Checkpoint, converted: Converted, out: Path, names: Collection[str] | None = None) -> Path:
    """A pipeline folder of graphs that are converted and not fused: what the passes do to them is held elsewhere."""
    assemble(
        out,
        parts=converted(checkpoint, names),
        companions=checkpoint.companions,
        origin=Origin("tiny", "cpu", family=checkpoint.family.name),
        options=checkpoint.options,
    )
    return out


def of_diffusers(cls: str, parts: Mapping[str, Any]) -> Any:
    """diffusers' pipeline of this class: without a watermark, without a safety checker."""
    unchecked = {"safety_checker": None, "requires_safety_checker": False}
    extra = unchecked if "safety_checker" in parts else {"add_watermarker": False}
    made = getattr(diffusers, cls)(**{**parts, **extra})
    made.set_progress_bar_config(disable=True)
    return made


def pattern(seed: int, height: int = SIZE, width: int = SIZE) -> Image.Image:
    squares = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3))
    return Image.fromarray(squares.repeat(8, 0).repeat(8, 1).astype("uint8"))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def assert_equal(drawn: Any, expected: Any) -> None:
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert drawn.shape == expected.shape
    difference = np.abs(drawn - expected).max()
    assert difference <= TOLERANCE, f"largest difference {difference}"


def differ(one: Any, other: Any) -> bool:
    return bool(np.abs(one - other).max() > 10 * TOLERANCE)
