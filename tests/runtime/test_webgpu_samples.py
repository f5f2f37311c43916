"""The samples, the refiner, and every family's small model, built for WebGPU: they show what is asked for, draw what PyTorch
draws, and are verified by running them. On SwiftShader each takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import swiftshader
import torch
from beside_diffusers import PROMPT, generator, pattern
from converted import Converted
from diffusers import StableDiffusionXLImg2ImgPipeline
from on_webgpu import TOLERANCE, Built, assert_on_webgpu, verified
from small_workflows import Events

from samples.klein.evaluate import noise
from sdflow.distance import psnr
from sdflow.machine.device import processor
from sdflow.runtime.pipeline import Pipeline
from sdflow.samples.prompts import evaluation_set, first_latents
from sdflow.samples.score import read
from sdflow.selftest import EMULATED_NOTE, selftest
from sdflow.store import Cache
from sdflow.tolerances import IMAGE_DECIBELS

MISSING = swiftshader.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
    pytest.mark.filterwarnings("ignore::sdflow.errors.SlowerWarning"),
]

CASE = evaluation_set()[7]
SAMPLES: dict[str, dict[str, Any]] = {
    "shapes": {"num_inference_steps": 8, "guidance_scale": 7.5},
    "shapes_klein": {"num_inference_steps": 4},
}
FAMILIES = (
    "tiny",
    "sdxl_tiny",
    "sdxl_refiner_tiny",
    "sd35_tiny",
    "flux1_schnell_tiny",
    "flux2_tiny",
    "z_image_tiny",
    *SAMPLES,
)


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    with swiftshader.swiftshader():
        yield


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_shows_what_it_is_asked_for(sample: str, converted: Converted, tmp_path: Path) -> None:
    built = Built(sample, tmp_path, converted)
    latents = torch.from_numpy((first_latents if sample == "shapes" else noise)(CASE.seed)[None])
    settings = {"latents": latents, "height": 128, "width": 128, **SAMPLES[sample]}
    ours = Pipeline.load(built.folder, "webgpu")
    (drawn,), (expected,) = (each(prompt=CASE.prompt, **settings).images for each in (ours, built.theirs))
    assert read(drawn).shows(CASE.scene)
    assert psnr(*(np.asarray(each, np.float32) / 255 for each in (drawn, expected))) >= IMAGE_DECIBELS["float32"]
    assert_on_webgpu(ours, built.folder)


def test_the_refiner_draws_what_diffusers_draws(converted: Converted, tmp_path: Path) -> None:
    built, image = Built("sdxl_refiner_tiny", tmp_path, converted), pattern(1)
    theirs = StableDiffusionXLImg2ImgPipeline(
        **built.theirs.components, requires_aesthetics_score=True, force_zeros_for_empty_prompt=False
    )
    theirs.set_progress_bar_config(disable=True)
    with torch.no_grad():
        encoded = theirs.vae.encode(theirs.image_processor.preprocess(image)).latent_dist.mode()
    settings: dict[str, Any] = {"num_inference_steps": 2, "strength": 0.6, "output_type": "np"}
    scaled = encoded * theirs.vae.config.scaling_factor
    expected = theirs(PROMPT, image=scaled, generator=generator(), **settings).images
    ours = Pipeline.load(built.folder, "webgpu")
    drawn = ours(PROMPT, image, generator=generator(), **settings).images
    assert expected.std() > 0.05, "an image of one colour would prove nothing"
    assert np.abs(drawn - expected).max() < TOLERANCE
    assert_on_webgpu(ours, built.folder)


@pytest.mark.parametrize("workflow", FAMILIES)
def test_a_family_is_verified_by_running_it(workflow: str, converted: Converted, tmp_path: Path) -> None:
    built = Built(workflow, tmp_path, converted)
    found = verified(built.folder, built.checkpoint, Cache(tmp_path / "cache"), sorted(built.checkpoint.submodels))
    assert found.passed, found.failure()
    for name, each in found.submodels.items():
        assert each.device is not None, name
        assert each.device.target == "webgpu"
        assert all(output.passed for output in each.device.outputs), name


def test_the_self_test_passes_and_its_report_names_the_hardware(tmp_path: Path) -> None:
    report = selftest("webgpu", Cache(tmp_path / "cache"), Events())
    assert (report.verdict, report.reason) == ("passed", None)
    assert report.device["accelerator"] == f"GPU emulated by {processor()}"
    assert EMULATED_NOTE in report.notes
    assert (report.steps, report.image_ms) == (2, None), "times of an emulated GPU say nothing"
    assert report.submodels.keys() == {"text_encoder", "unet", "vae_encoder", "vae_decoder"}
    assert all(list(each.nodes) == ["WebGpuExecutionProvider"] for each in report.submodels.values())
    assert report.images[0].decibels >= IMAGE_DECIBELS["float32"]
