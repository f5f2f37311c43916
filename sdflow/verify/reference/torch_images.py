"""Images from diffusers' own pipeline, with which those of artifacts are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.samples import prompts
from sdflow.verify.reference.selection import Selection

if TYPE_CHECKING:
    import torch

IMAGE_FILE = "image.npz"
SAMPLE_FILE = "sample.npz"

Embeddings = Mapping[str, "torch.Tensor | list[torch.Tensor]"]
"""Prompt arguments of diffusers' pipeline: a tensor with a row per prompt, or a list of tensors if lengths differ."""


def embeddings_in(texts: Embeddings, dtype: torch.dtype) -> Embeddings:
    """Convert the embeddings to another type."""
    return {
        name: [text.to(dtype) for text in each] if isinstance(each, list) else each.to(dtype)
        for name, each in texts.items()
    }


def type_of(texts: Embeddings) -> torch.dtype:
    """The type of the first tensor."""
    first = next(iter(texts.values()))
    return (first[0] if isinstance(first, list) else first).dtype


def draw_by_torch(pipeline: Any, selection: Selection, texts: Embeddings, start: Mapping[str, Any]) -> np.ndarray:
    """The image, float32 (rows, columns, 3) in [0, 1]. start: latents and images as arguments, from `torch_start` and
    `control_arguments`."""
    import torch

    image: np.ndarray = pipeline(
        **texts,
        **{**start, "latents": start["latents"].to(type_of(texts))},
        num_inference_steps=selection.steps,
        guidance_scale=selection.guidance_scale,
        generator=torch.Generator().manual_seed(selection.seed),
        output_type="np",
    ).images[0]
    return image.astype(np.float32)


def control_arguments(controls: Sequence[np.ndarray]) -> dict[str, Any]:
    """Arguments for the images of the ControlNets; empty without any."""
    import torch

    return {"image": [torch.from_numpy(each) for each in controls]} if controls else {}


def sample_cases(selection: Selection) -> Any:
    return prompts.evaluation_set()[: selection.sample_cases]


def draw_sample(pipeline: Any, selection: Selection, texts: Embeddings, given: Mapping[str, Any], out: Path) -> None:
    """Generate the images of the sample's own evaluation set, to score their meaning."""
    import torch

    images = pipeline(
        **texts,
        latents=torch.from_numpy(np.stack([prompts.first_latents(case.seed) for case in sample_cases(selection)])),
        num_inference_steps=selection.sample_steps,
        guidance_scale=selection.guidance_scale,
        output_type="np",
        **given,
    ).images
    np.savez(out / SAMPLE_FILE, float32=images)
