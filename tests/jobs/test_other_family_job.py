"""A family that is defined in tests alone, with everything that a transformer of flow matching needs, drawn as diffusers does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_flux_checkpoint import OTHER_FAMILIES, tiny_flux

PROMPT, STEPS = "a large red circle", 3
DRAW = """
import json, sys
import numpy as np, torch
from sdflow.runtime.pipeline import Pipeline
folder, latents, out, options = sys.argv[1:]
pipeline = Pipeline.load(folder, "cpu")
drawn = pipeline(latents=torch.from_numpy(np.load(latents)), output_type="np", **json.loads(options))
np.save(out, drawn.images)
"""


def run(folder: Path, *command: str) -> str:
    """With the family on the import path, as all processes that it starts."""
    environment = {**os.environ, "PYTHONPATH": str(OTHER_FAMILIES), "SDFLOW_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other_family")
    tiny_flux().save_pretrained(folder / "flux")
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> Path:
    run(folder, "-m", "sdflow", "init", "--model", "flux", "--out", "w.yaml")
    run(folder, "-m", "sdflow", "run", "w.yaml")
    return folder / "pipelines/w"


def test_its_checkpoint_is_known(folder: Path) -> None:
    assert "flux-tiny" in run(folder, "-m", "sdflow", "inspect", "flux")


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 80)])
def test_it_draws_as_diffusers(folder: Path, built: Path, height: int, width: int) -> None:
    pipeline = tiny_flux()
    noise = torch.randn(1, 8, height // 4, width // 4, generator=torch.Generator().manual_seed(1))
    packed = pipeline._pack_latents(noise, *noise.shape)
    with torch.no_grad():
        exact = pipeline(
            PROMPT, latents=packed, height=height, width=width, num_inference_steps=STEPS, guidance_scale=1.0,
            max_sequence_length=64, output_type="np",
        ).images  # fmt: skip
    np.save(folder / "noise.npy", noise.numpy())
    options = {"prompt": PROMPT, "num_inference_steps": STEPS, "height": height, "width": width, "guidance_scale": 1.0}
    run(folder, "-c", DRAW, str(built), "noise.npy", "drawn.npy", json.dumps(options))
    assert np.abs(np.load(folder / "drawn.npy") - exact).max() < 1e-4
