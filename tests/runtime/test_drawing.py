"""Drawings of one pipeline take turns, step by step, and each gives the bytes that it gives alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sdflow.runtime.pipeline import Pipeline

SIZE = 64
COMMON: dict[str, Any] = {"num_inference_steps": 4, "height": SIZE, "width": SIZE, "guidance_scale": 5.0}
REUSED: dict[str, Any] = {"reuse": {"every": 2, "from": 0.0}}


def picture() -> dict[str, Any]:
    pixels = np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3)).astype("uint8")
    return {"image": Image.fromarray(pixels)}


def masked() -> dict[str, Any]:
    white = np.repeat(np.array([0, 255], "uint8"), SIZE * SIZE // 2).reshape(SIZE, SIZE)
    return {**picture(), "mask_image": Image.fromarray(white)}


TURNS: dict[str, tuple[dict[str, Any], ...]] = {
    "two prompts": ({}, {}),
    "with guidance and without": ({}, {"guidance_scale": 1.0}),
    "an image and a mask": ({}, picture(), masked()),
    "two sizes": ({}, {"height": 2 * SIZE}),
    "deep features of each": (REUSED, REUSED),
    "guidance in part of the steps": ({"guidance_interval": {"to": 0.5}}, {}),
    "several images": ({"num_images_per_prompt": 2}, {"num_images_per_prompt": 2}),
}


@pytest.fixture(scope="module")
def parted(tiny_pipeline: Path) -> Pipeline:
    return Pipeline.load(tiny_pipeline, "cpu", threads=1)


@pytest.fixture(scope="module")
def whole(parted: Pipeline) -> Pipeline:
    """Its denoiser is not taken apart, so that nothing can be left out."""
    return Pipeline(parted.family, parted.submodels, parted.companions, split=False)


@pytest.mark.parametrize("turns", TURNS)
def test_drawings_that_take_turns_give_what_each_gives_alone(parted: Pipeline, turns: str) -> None:
    require_equal(parted, TURNS[turns])


@pytest.mark.parametrize("turns", ["two prompts", "an image and a mask"])
def test_so_they_do_with_a_whole_denoiser(whole: Pipeline, turns: str) -> None:
    require_equal(whole, TURNS[turns])


def require_equal(pipeline: Pipeline, turns: Sequence[dict[str, Any]]) -> None:
    def settings(number: int) -> dict[str, Any]:
        common = {**COMMON, "prompt": f"horse number {number}", "generator": torch.Generator().manual_seed(number)}
        return {**common, **turns[number]}

    alone = [pipeline(**settings(number), output_type="np").images for number in range(len(turns))]
    drawings = [pipeline.drawing(**settings(number)) for number in range(len(turns))]
    while not all(drawing.done for drawing in drawings):
        for drawing in drawings:
            if not drawing.done:
                drawing.step()
    for expected, drawing in zip(alone, drawings, strict=True):
        assert drawing.finish("np").images.tobytes() == expected.tobytes()
    assert len({expected.tobytes() for expected in alone}) == len(alone), "they are different images"
