"""The ONNX pipeline draws what the PyTorch pipeline draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdflow.runtime.pipeline import TextToImagePipeline

# Largest difference of pixel values in [0, 1] after 5 steps, fp32 on the CPU.
TOLERANCE = 1e-3

PROMPT = "a photo of an astronaut riding a horse on mars"
SETTINGS = {"num_inference_steps": 5, "guidance_scale": 7.5, "negative_prompt": "blurry"}


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> TextToImagePipeline:
    return TextToImagePipeline.load(tiny_pipeline, "cpu")


@pytest.fixture(scope="module")
def latents(pipeline: TextToImagePipeline) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(pipeline.latents_shape(1, None, None), dtype=np.float32)


def torch_image(tiny_torch: Any, latents: np.ndarray, **settings: Any) -> np.ndarray:
    return tiny_torch(PROMPT, latents=torch.from_numpy(latents), output_type="np", **{**SETTINGS, **settings}).images


@pytest.mark.parametrize("guidance_scale", [1.0, 7.5])
def test_image_equals_pytorchs(
    pipeline: TextToImagePipeline, tiny_torch: Any, latents: np.ndarray, guidance_scale: float
) -> None:
    expected = torch_image(tiny_torch, latents, guidance_scale=guidance_scale)
    drawn = pipeline(PROMPT, latents=latents, output_type="np", **{**SETTINGS, "guidance_scale": guidance_scale})
    print(np.abs(drawn.images - expected).max(), expected.std())
    assert expected.std() > 0.05, "a picture of one colour would prove nothing"
    assert np.abs(drawn.images - expected).max() <= TOLERANCE
