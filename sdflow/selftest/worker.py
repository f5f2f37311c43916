"""The process that generates images for `sdflow selftest`: if a provider crashes it, a report remains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sdflow.processes.in_worker import serve_request
from sdflow.runtime.pipeline import Pipeline
from sdflow.samples.prompts import evaluation_set, first_latents
from sdflow.selftest import MODEL, png_of
from sdflow.sources import PlainDigests, open_checkpoint
from sdflow.sources.load import load_pipeline

CASES = slice(7, None, 24)
"""Cases of the sample's evaluation set: those of its own tests, some never shown in training."""
GUIDANCE = 7.5
SCALE = 8
"""Pixels per latent."""


def draw(request: Mapping[str, Any], phase: Callable[[str], None]) -> list[dict[str, Any]]:
    """Each case's image from the same initial latents: prompt, seed, png (base64), and whether it shows the right
    content.

    request: number of images and of steps, size in pixels; folder, target and engine_cache of a pipeline. Without a
        folder, PyTorch generates on the CPU.
    """
    import torch

    from sdflow.samples.score import read

    cases = evaluation_set()[CASES][: request["images"]]
    pipeline = _pipeline(request)
    size = request["size"]
    latents = torch.from_numpy(np.stack([first_latents(case.seed) for case in cases]))
    latents = latents[..., : size // SCALE, : size // SCALE].contiguous()
    found = []
    for index, case in enumerate(cases):
        phase(f"image {index + 1} of {len(cases)}")
        (image,) = pipeline(
            case.prompt,
            latents=latents[index : index + 1],
            height=size,
            width=size,
            num_inference_steps=request["steps"],
            guidance_scale=GUIDANCE,
        ).images
        shows = read(image).shows(case.scene)
        found.append({"prompt": case.prompt, "seed": case.seed, "png": png_of(image), "shows": shows})
    return found


def _pipeline(request: Mapping[str, Any]) -> Any:
    if request["folder"] is not None:
        engines = request["engine_cache"]
        return Pipeline.load(
            Path(request["folder"]), request["target"], engine_cache=Path(engines) if engines else None
        )
    pipeline = load_pipeline(open_checkpoint(MODEL, digests=PlainDigests(), download=False))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


if __name__ == "__main__":
    serve_request(draw)
