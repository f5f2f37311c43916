"""Does optimum-onnx load a pipeline folder as it is, and draw what sdflow draws?

Its pins (transformers < 4.58) clash with sdflow's, so it has an environment of its own, and sdflow is not imported:

    python3.11 -m venv optimum-env
    optimum-env/bin/pip install optimum-onnx==0.1.0 onnxruntime==1.31.1 torch==2.13.0 \
        "diffusers<0.37" "transformers>=4.57,<4.58"
    optimum-env/bin/python tests/compat/optimum_check.py FOLDER [REFERENCE.npz]

REFERENCE.npz, from `python tests/compat/reference_image.py FOLDER REFERENCE.npz` in sdflow's environment, holds
latents, settings and sdflow's image; the exit status is 1 when optimum-onnx's differs by more than TOLERANCE.

Seen with exactly these versions (diffusers 0.36.0, transformers 4.57.6) on the folder of synthetic:sd15-tiny for the
CPU: it loads unchanged, with two warnings (config.json has no `time_cond_proj_dim`; `timestep` has an axis), and
without the safety checker, which optimum-onnx does not support; the largest difference after 5 steps is 0.0.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", ORT_DISABLE_TELEMETRY="1")

import diffusers
import numpy as np
import onnxruntime
import optimum.version
import torch
import transformers
from optimum.onnxruntime import ORTStableDiffusionPipeline

TOLERANCE = 1e-3  # largest difference of pixel values in [0, 1]


def main(folder: str, reference: str | None = None) -> int:
    """Load the folder, draw, and compare with the reference if one is given. Returns the exit status."""
    for module in (optimum.version, diffusers, transformers, onnxruntime, torch):
        print(module.__name__, module.__version__)
    pipeline = ORTStableDiffusionPipeline.from_pretrained(folder, provider="CPUExecutionProvider")
    print("loaded:", ", ".join(sorted(pipeline.components)), "scheduler", type(pipeline.scheduler).__name__)
    if reference is None:
        image = pipeline("a horse", num_inference_steps=2, output_type="np").images
        print("drew", image.shape, "mean", image.mean())
        return 0
    with np.load(reference) as arrays:
        settings = json.loads(str(arrays["settings"]))
        drawn = pipeline(**settings, latents=torch.from_numpy(arrays["latents"]), output_type="np").images
        difference = float(np.abs(drawn - arrays["image"]).max())
    print("largest difference", difference, "tolerance", TOLERANCE)
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
