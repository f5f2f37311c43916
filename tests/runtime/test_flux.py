"""FLUX.1-schnell and -dev draw what diffusers' own pipelines draw (fp32 on the CPU, small), from text, from an image and into a
mask.

diffusers is given the image to start from as latents: what it encodes itself is a sample, not the mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from beside_diffusers import PROMPT, assert_equal, differ, generator, pattern, put_together
from converted import Converted
from PIL import Image

from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.families.flux.packing import packed
from sdflow.families.shared.defaults import Defaults
from sdflow.runtime.denoiser.schedule import trace
from sdflow.runtime.files.folder import folder_defaults
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.sources.architectures import companion_folder

SCHNELL, DEV = "flux1-schnell-tiny", "flux1-dev-tiny"
LENGTHS = {SCHNELL: 256, DEV: 512}
LONG = "a horse on the moon, rendered in oil, with every star of the southern sky above it, and nobody to see it " * 3


class Built:
    """A small model: our folder on ONNX Runtime, and diffusers' pipeline."""

    def __init__(self, architecture: str, root: Path, converted: Converted) -> None:
        checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
        self.architecture = architecture
        self.folder = put_together(checkpoint, converted, root / "pipeline")
        self.ours = Pipeline.load(self.folder, "cpu", threads=1)
        self.theirs = load_pipeline(checkpoint)
        assert type(self.theirs) is diffusers.FluxPipeline
        self.theirs.set_progress_bar_config(disable=True)

    def other(self, cls: Any) -> Any:
        made = cls(**self.theirs.components)
        made.set_progress_bar_config(disable=True)
        return made

    def mean(self, image: Image.Image) -> torch.Tensor:
        """An image's latents, without the noise that diffusers adds when it encodes."""
        pixels = self.theirs.image_processor.preprocess(image)
        with torch.no_grad():
            encoded = self.theirs.vae.encode(pixels).latent_dist.mode()
        mean: torch.Tensor = (encoded - self.theirs.vae.config.shift_factor) * self.theirs.vae.config.scaling_factor
        return mean


@pytest.fixture(scope="module", params=[SCHNELL, DEV])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, converted: Converted) -> Built:
    return Built(request.param, tmp_path_factory.mktemp("flux"), converted)


@pytest.mark.parametrize(
    ("height", "width", "prompt", "length"),
    [(64, 64, PROMPT, None), (64, 96, LONG, None), (96, 48, PROMPT, 77)],
)
def test_an_image_from_text_is_diffusers(
    built: Built, height: int, width: int, prompt: str, length: int | None
) -> None:
    latents = torch.randn((1, 16, height // 8, width // 8), generator=generator())
    given: dict[str, Any] = {"height": height, "width": width, "num_inference_steps": 3, "output_type": "np"}
    given |= {"guidance_scale": 3.5, "prompt_2": f"{prompt}, in oil"}
    own = {} if length is None else {"max_sequence_length": length}
    theirs = {"max_sequence_length": length or LENGTHS[built.architecture], "latents": packed(latents)}
    assert_equal(
        built.ours(prompt, latents=latents, **own, **given).images, built.theirs(prompt, **theirs, **given).images
    )


def test_several_prompts_are_drawn_side_by_side(built: Built) -> None:
    latents = torch.randn((2, 16, 8, 8), generator=generator())
    given: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
    theirs = {"max_sequence_length": LENGTHS[built.architecture], "latents": packed(latents)}
    prompts = [PROMPT, "a lighthouse"]
    assert_equal(built.ours(prompts, latents=latents, **given).images, built.theirs(prompts, **theirs, **given).images)


@pytest.mark.parametrize("strength", [0.33, 0.95])
def test_an_image_from_an_image_is_diffusers(built: Built, strength: float) -> None:
    image = pattern(1, 64, 96)
    given: dict[str, Any] = {"strength": strength, "num_inference_steps": 6, "guidance_scale": 5.0, "output_type": "np"}
    expected = built.other(diffusers.FluxImg2ImgPipeline)(
        PROMPT, image=built.mean(image), height=64, width=96, generator=generator(),
        max_sequence_length=LENGTHS[built.architecture], **given,
    )  # fmt: skip
    assert_equal(built.ours(PROMPT, image, generator=generator(), **given).images, expected.images)


@pytest.mark.parametrize("strength", [0.7, 1.0])
def test_latents_into_a_mask_are_diffusers(built: Built, strength: float) -> None:
    """Latents, not pixels: what diffusers keeps of the image within a mask's edge, sdflow pastes from its pixels."""
    image, mask = pattern(1, 64, 96), Image.new("L", (96, 64), 0)
    mask.paste(255, (16, 8, 72, 40))
    given: dict[str, Any] = {"strength": strength, "num_inference_steps": 5, "output_type": "latent"}
    pixels = built.theirs.image_processor.preprocess(image)
    expected = built.other(diffusers.FluxInpaintPipeline)(
        PROMPT, image=built.mean(image), mask_image=mask, masked_image_latents=pixels, height=64, width=96,
        generator=generator(), max_sequence_length=LENGTHS[built.architecture],
        **given, guidance_scale=7.0,
    ).images  # fmt: skip
    drawn = torch.as_tensor(built.ours(PROMPT, image, mask, **given, guidance_scale=7.0, generator=generator()).images)
    assert expected.std() > 0.05
    assert np.abs(packed(drawn).numpy() - expected.numpy()).max() < 1e-4


def test_the_guidance_scale_is_an_input_of_dev_and_nothing_to_schnell(built: Built) -> None:
    latents = torch.randn((1, 16, 8, 8), generator=generator())
    given: dict[str, Any] = {
        "latents": latents,
        "num_inference_steps": 2,
        "output_type": "np",
        "height": 64,
        "width": 64,
    }
    low, high = (built.ours(PROMPT, guidance_scale=scale, **given).images for scale in (1.0, 6.0))
    assert differ(low, high) == (built.architecture == DEV)
    assert ("guidance" in [port.name for port in _ports(built).inputs]) == (built.architecture == DEV)


def _ports(built: Built) -> Any:
    return built.ours.family.part("transformer").ports(built.ours.configs["transformer"])


def test_defaults_are_those_of_the_model(built: Built) -> None:
    found = folder_defaults(built.folder)
    if built.architecture == SCHNELL:
        assert found["text"] == Defaults(steps=4, guidance_scale=0.0)
    else:
        assert found["text"] == Defaults(steps=50, guidance_scale=3.5)
        assert found["image"] == found["inpaint"] == Defaults(steps=28, guidance_scale=7.0, strength=0.6)


def test_negative_prompts_weights_and_unknown_lengths_are_refused(built: Built) -> None:
    given: dict[str, Any] = {"num_inference_steps": 1, "height": 64, "width": 64}
    with pytest.raises(UsageError, match="has no negative prompt"):
        built.ours(PROMPT, negative_prompt="blurred", **given)
    with pytest.raises(UsageError, match="weights"):
        built.ours("a (horse:1.3)", prompt_syntax="a1111", **given)
    with pytest.raises(UsageError, match="max_sequence_length"):
        built.ours(PROMPT, max_sequence_length=513, **given)


@pytest.mark.parametrize("architecture", [SCHNELL, DEV])
@pytest.mark.parametrize("tokens", [256, 1024, 4096, 5000])
def test_timesteps_are_those_of_diffusers_pipeline(architecture: str, tokens: int) -> None:
    """-dev shifts them by the size of the image, -schnell not at all."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    own = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(companion_folder(architecture, "scheduler"))
    wanted = diffusers.FlowMatchEulerDiscreteScheduler.from_config(own.config)
    mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
    timesteps, _ = retrieve_timesteps(wanted, 7, "cpu", sigmas=np.linspace(1.0, 1 / 7, 7), mu=mu)
    schedule = trace(own, 7, noising=FAMILIES["flux"].noising, tokens=tokens)
    assert torch.equal(schedule.timesteps[:, 0], timesteps)
