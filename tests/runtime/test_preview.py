"""Previews: what diffusers' own schedulers take for the image after each step, in colors or by a tiny VAE."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.shared.noising import DIFFUSION
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.drawing.preview import Preview, by_colors
from sdflow.runtime.generate import generate
from sdflow.runtime.pipeline import Pipeline

TOLERANCE = 1e-4
SIZE = 64
PROMPT = "a horse on the moon"
SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "height": SIZE, "width": SIZE, "guidance_scale": 6.0}


@pytest.fixture(scope="module")
def ours(tiny_pipeline: Path) -> Pipeline:
    return Pipeline.load(tiny_pipeline, "cpu", checker=False, threads=1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def recorded(scheduler: Any) -> list[torch.Tensor]:
    """What its steps take for the image, as they come."""
    found, step = [], scheduler.step

    @functools.wraps(step)  # pipelines look at what it takes
    def recording(*args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        result = step(*args, **kwargs, return_dict=True)
        outputs = getattr(scheduler, "model_outputs", None)
        found.append((result.pred_original_sample if outputs is None else outputs[-1]).clone())
        return result if return_dict else (result.prev_sample,)

    scheduler.step = recording
    return found


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", ["ddim", "euler", "euler_trailing", "euler_a", "dpm++_2m", "unipc"])
def test_a_preview_is_what_the_scheduler_takes_for_the_image(
    ours: Pipeline, tiny_torch: Any, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pipeline in (ours, tiny_torch):
        made = named_scheduler(name, {**pipeline.scheduler.config, "prediction_type": kind}, DIFFUSION)
        monkeypatch.setattr(pipeline, "scheduler", made)
    expected = recorded(tiny_torch.scheduler)
    tiny_torch(PROMPT, generator=generator(), output_type="latent", **SETTINGS)
    seen: list[Preview] = []
    ours(PROMPT, generator=generator(), output_type="latent", callback_on_preview=seen.append, **SETTINGS)
    assert [(each.index, each.total) for each in seen] == [(index, 4) for index in range(4)]
    for preview, theirs in zip(seen, expected, strict=True):
        assert (preview.latents - theirs).abs().max() <= TOLERANCE * max(1.0, float(theirs.abs().max()))


def test_without_a_tiny_vae_each_latent_is_a_pixel(ours: Pipeline) -> None:
    seen: list[Preview] = []
    ours([PROMPT, "a cow"], generator=generator(), callback_on_preview=seen.append, **SETTINGS)
    images = seen[-1].images()
    assert [image.size for image in images] == [(SIZE // ours.latents.scale,) * 2] * 2
    assert np.asarray(images[0]).std() > 5 and np.asarray(images[0]).tolist() != np.asarray(images[1]).tolist()


def test_outside_of_the_mask_a_preview_is_the_image(ours: Pipeline) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3)).astype("uint8"))
    mask = np.zeros((SIZE, SIZE), "uint8")
    mask[:, SIZE // 2 :] = 255
    seen: list[Preview] = []
    given = {"generator": generator(), "callback_on_preview": seen.append, "num_inference_steps": 3}
    result = ours(PROMPT, image, Image.fromarray(mask), output_type="latent", **given).images
    half = result.shape[3] // 2
    for preview in seen:
        assert np.abs(preview.latents.numpy() - result)[..., :half].max() <= TOLERANCE
    assert np.abs(seen[0].latents.numpy() - result)[..., half:].max() > 100 * TOLERANCE


def test_the_colors_are_those_of_their_sources() -> None:
    """Of XL as diffusers' manual computes them (using-diffusers/callback), of 1.x as the forum's factors are used."""
    latents = torch.randn(2, 4, 3, 5, generator=generator())
    weights = torch.tensor([[60.0, -60, 25, -70], [60, -5, 15, -50], [60, 10, -5, -35]])
    xl = torch.einsum("blxy,rl->bxyr", latents, weights) + torch.tensor([150.0, 140, 130])
    for name in ("stable_diffusion_xl", "stable_diffusion_xl_refiner"):
        assert (by_colors(latents, FAMILIES[name].colors) - xl.clamp(0, 255) / 255).abs().max() < 1e-6
    channel = torch.tensor([0.0, 0.0, 0.0, 1.0]).reshape(1, 4, 1, 1)
    expected = (torch.tensor([-0.184, -0.271, -0.473]) + 1) / 2
    for name in ("stable_diffusion", "latent_consistency"):
        assert (by_colors(channel, FAMILIES[name].colors).flatten() - expected).abs().max() < 1e-6


def test_generate_writes_one_for_each_step_and_image(tiny_pipeline: Path, tmp_path: Path) -> None:
    request = GenerateRequest(
        tiny_pipeline, [PROMPT], tmp_path, seed=5, images=2, batch=2, steps=3, height=SIZE, width=SIZE, target="cpu",
        threads=1, preview=True, scheduler="euler",
    )  # fmt: skip
    generate(request)
    files = sorted(
        path.relative_to(tmp_path / "previews").as_posix() for path in (tmp_path / "previews").rglob("*.png")
    )
    assert files == [f"{name}/{step:03d}.png" for name in ("001-5", "002-6") for step in (1, 2, 3)]
    with Image.open(tmp_path / "previews/001-5/003.png") as last, Image.open(tmp_path / "001-5.png") as image:
        assert image.size == (SIZE, SIZE) and last.size[0] < SIZE


def test_what_draws_previews_is_checked(tiny_pipeline: Path, tmp_path: Path) -> None:
    request = GenerateRequest(tiny_pipeline, [PROMPT], tmp_path, target="cpu", previews=tiny_pipeline)
    with pytest.raises(UsageError, match="no effect without previews") as caught:
        generate(request)
    assert caught.value.where == "--preview-with"
    with pytest.raises(UsageError, match="AutoencoderKL, too slow for previews"):
        Pipeline.load(tiny_pipeline, "cpu", threads=1, previews=tiny_pipeline)
