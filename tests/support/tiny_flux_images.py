"""How far the images of a folder of the tiny FLUX family, and of it exported as one file, are from those of diffusers' own
pipelines, as JSON: `python -m tiny_flux_images CHECKPOINT FOLDER ONE_FILE`. A process of its own, with the family on its import
path."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import diffusers
import numpy as np
import onnxruntime
import torch
from beside_diffusers import PROMPT, generator, pattern
from PIL import Image
from sdflow_families.tiny_flux.family import LENGTH
from sdflow_families.tiny_flux.model import packed

from sdflow.families.shared.text import token_ids
from sdflow.runtime.pipeline import Pipeline

HEIGHT, WIDTH = 64, 96


def differences(checkpoint: str, folder: str, one_file: str) -> Iterator[tuple[str, float]]:
    """What was drawn, and the largest difference, of pixels in [0, 1] or of latents."""
    ours, theirs = Pipeline.load(folder, "cpu"), diffusers.FluxPipeline.from_pretrained(checkpoint)
    both: dict[str, Any] = {"num_inference_steps": 3, "output_type": "np"}
    text: dict[str, Any] = {**both, "max_sequence_length": LENGTH}
    for height, width in ((64, 64), (HEIGHT, WIDTH), (80, 48)):
        latents = torch.randn((1, 8, height // 4, width // 4), generator=generator())
        size = {"height": height, "width": width}
        expected = theirs(PROMPT, latents=packed(latents), **size, **text).images
        yield f"text {height}x{width}", largest(ours(PROMPT, latents=latents, **size, **both).images, expected)
        if (height, width) == (HEIGHT, WIDTH):
            tokens = token_ids(theirs.tokenizer, [PROMPT]), token_ids(theirs.tokenizer_2, [PROMPT], LENGTH)
            names = ("input_ids", "input_ids_2", "latents")
            given = dict(zip(names, (*(each.int().numpy() for each in tokens), latents.numpy()), strict=True))
            (drawn,) = onnxruntime.InferenceSession(one_file).run(None, given)
            yield "one file", largest(drawn, expected)
    image, mask = pattern(1, HEIGHT, WIDTH), Image.new("L", (WIDTH, HEIGHT), 0)
    mask.paste(255, (16, 8, 72, 40))
    pixels = theirs.image_processor.preprocess(image)
    with torch.no_grad():
        encoded = theirs.vae.encode(pixels).latent_dist.mode()
    mean = (encoded - theirs.vae.config.shift_factor) * theirs.vae.config.scaling_factor
    text |= {"image": mean, "height": HEIGHT, "width": WIDTH, "strength": 0.7}
    both |= {"strength": 0.7}
    expected = diffusers.FluxImg2ImgPipeline(**theirs.components)(PROMPT, **text, generator=generator()).images
    yield "image", largest(ours(PROMPT, image, **both, generator=generator()).images, expected)
    # Latents: what diffusers keeps of the image within a mask's edge, sdflow pastes from its pixels.
    text |= {"mask_image": mask, "masked_image_latents": pixels, "output_type": "latent"}
    both |= {"output_type": "latent"}
    expected = diffusers.FluxInpaintPipeline(**theirs.components)(PROMPT, **text, generator=generator()).images
    in_mask = torch.as_tensor(ours(PROMPT, image, mask, **both, generator=generator()).images)
    yield "mask", largest(packed(in_mask).numpy(), expected.numpy())


def largest(drawn: np.ndarray, expected: np.ndarray) -> float:
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert drawn.shape == expected.shape
    return float(np.abs(drawn - expected).max())


if __name__ == "__main__":
    diffusers.utils.logging.disable_progress_bar()
    print(json.dumps(dict(differences(*sys.argv[1:]))))
