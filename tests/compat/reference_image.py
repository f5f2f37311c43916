"""Draw an image with sdflow and keep it with its latents and settings: reference_image.py FOLDER OUT.npz"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from sdflow.runtime.pipeline import Pipeline

SETTINGS = {
    "prompt": "a photo of an astronaut riding a horse on mars",
    "negative_prompt": "blurry",
    "num_inference_steps": 5,
    "guidance_scale": 7.5,
}


def main(folder: str, out: str) -> None:
    """Write latents, settings (JSON) and the image (float32 NHWC in [0, 1]) to `out`."""
    pipeline = Pipeline.load(Path(folder), "cpu")
    latents = np.random.default_rng(1).standard_normal(pipeline.latents_shape(1, None, None), dtype=np.float32)
    image = pipeline(**SETTINGS, latents=latents, output_type="np").images
    np.savez(out, latents=latents, image=image, settings=json.dumps(SETTINGS))


if __name__ == "__main__":
    main(*sys.argv[1:])
