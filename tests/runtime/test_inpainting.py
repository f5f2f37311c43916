"""UNets made for inpainting draw what diffusers' inpainting pipelines draw with them (fp32 on the CPU, small).

diffusers prepares image and mask itself. Only one thing is put in its way: what it encodes an image to is the mean of the
encoder's distribution, where it would draw a sample of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
from beside_diffusers import PROMPT, SIZE, TOLERANCE, assert_equal, generator, put_together
from converted import Converted
from PIL import Image

from sdflow.errors import CheckpointError, UsageError
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.files.folder import folder_task, read_index
from sdflow.runtime.generate import generate
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_pipeline, open_checkpoint
from sdflow.sources.checkpoint import pipeline_facts

SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "output_type": "np", "guidance_scale": 7.5, "height": SIZE}
SETTINGS["width"] = SIZE
ASSEMBLED = {
    "sd15-inpainting-tiny": "OnnxStableDiffusionInpaintPipeline",
    "sd2-inpainting-tiny": "OnnxStableDiffusionInpaintPipeline",
    "sdxl-inpainting-tiny": "ORTStableDiffusionXLInpaintPipeline",
}


class Built:
    """A small pipeline for inpainting: our folder on ONNX Runtime, and diffusers' own."""

    def __init__(self, architecture: str, root: Path, converted: Converted) -> None:
        checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
        self.architecture, self.folder, self.checkpoint = architecture, root / "pipeline", checkpoint
        put_together(checkpoint, converted, self.folder)
        self.ours = Pipeline.load(self.folder, "cpu", threads=1)
        kind = "StableDiffusionXLInpaintPipeline" if "sdxl" in architecture else "StableDiffusionInpaintPipeline"
        extra = {"add_watermarker": False} if "sdxl" in architecture else {"requires_safety_checker": False}
        parts = {**load_pipeline(checkpoint).components, "safety_checker": None, **extra}
        self.theirs = getattr(diffusers, kind)(**{name: each for name, each in parts.items() if name in _takes(kind)})
        self.theirs.set_progress_bar_config(disable=True)
        vae = self.theirs.vae
        self.theirs._encode_vae_image = lambda image, generator: (
            vae.encode(image).latent_dist.mode() * vae.config.scaling_factor
        )


def _takes(kind: str) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(getattr(diffusers, kind)).parameters)


@pytest.fixture(scope="module")
def make(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    return cache(lambda name: Built(name, tmp_path_factory.mktemp(name), converted))


@pytest.fixture(
    params=[pytest.param(each, marks=pytest.mark.slow if each.startswith("sd2") else ()) for each in ASSEMBLED]
)
def built(request: pytest.FixtureRequest, make: Callable[[str], Built]) -> Built:
    return make(request.param)


@pytest.fixture
def one(make: Callable[[str], Built]) -> Built:
    """For what does not depend on the family."""
    return make("sdxl-inpainting-tiny")


def image(turned: bool = False) -> Image.Image:
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    colours = np.stack([rows, columns, 1 - rows], axis=-1)
    return Image.fromarray(((colours[::-1] if turned else colours) * 255).astype("uint8"))


def mask(begin: int = SIZE // 2) -> Image.Image:
    return Image.fromarray(np.where(np.arange(SIZE) >= begin, 255, 0)[None].repeat(SIZE, 0).astype("uint8"))


@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_inpainting_equals_diffusers(built: Built, strength: float) -> None:
    given = {"image": image(), "mask_image": mask(), "strength": strength}
    expected = built.theirs(PROMPT, **given, generator=generator(), **SETTINGS).images
    drawn = built.ours(PROMPT, **given, whole=True, generator=generator(), **SETTINGS).images
    assert_equal(drawn, expected)
    other = built.ours(PROMPT, **{**given, "mask_image": mask(8)}, whole=True, generator=generator(), **SETTINGS).images
    assert np.abs(other - drawn).max() > 10 * TOLERANCE, "the mask changes nothing"


@pytest.mark.once("built")
def test_several_images_with_masks_of_their_own_equal_diffusers(built: Built) -> None:
    given = {"image": [image(), image(turned=True)], "mask_image": [mask(), mask(16)], "strength": 1.0}
    prompts = [PROMPT, "a red house"]
    settings = {**SETTINGS, "num_inference_steps": 2}
    expected = built.theirs(prompts, **given, generator=generator(), **settings).images
    assert_equal(built.ours(prompts, **given, whole=True, generator=generator(), **settings).images, expected)


def test_several_images_of_one_image_equal_diffusers(one: Built) -> None:
    given = {"image": image(), "mask_image": mask(), "strength": 0.6, "num_images_per_prompt": 2}
    expected = one.theirs(PROMPT, **given, generator=generator(), **SETTINGS).images
    assert_equal(one.ours(PROMPT, **given, whole=True, generator=generator(), **SETTINGS).images, expected)


def test_the_folder_says_that_it_is_for_inpainting(built: Built) -> None:
    assert folder_task(built.folder) == "inpaint"
    assert read_index(built.folder)["_class_name"] == ASSEMBLED[built.architecture]
    with pytest.raises(UsageError, match="the pipeline has no vae_encoder"):
        submodels = {name: each for name, each in built.ours.submodels.items() if name != "vae_encoder"}
        Pipeline(built.ours.family, submodels, built.ours.companions)


@pytest.mark.parametrize(("given", "where"), [({}, "image"), ({"image": Image.new("RGB", (SIZE, SIZE))}, "mask_image")])
def test_without_an_image_or_a_mask_it_says_what_to_give(one: Built, given: dict[str, Any], where: str) -> None:
    with pytest.raises(UsageError, match="this is an inpainting model") as caught:
        one.ours(PROMPT, **given, **SETTINGS)
    assert caught.value.where == where and where in str(caught.value.remedy)


def test_images_and_masks_that_do_not_go_into_those_to_draw_are_refused(one: Built) -> None:
    for images, masks, what in ((image(), [mask()] * 2, "2 masks"), ([image()] * 2, mask(), "2 images to start from")):
        with pytest.raises(UsageError, match=f"{what} for 3 images to generate"):
            one.ours([PROMPT] * 3, images, masks, generator=generator(), **SETTINGS)


def test_generate_says_before_loading_that_an_image_and_a_mask_are_wanted(one: Built, tmp_path: Path) -> None:
    request = GenerateRequest(folder=one.folder, prompts=[PROMPT], out=tmp_path)
    with pytest.raises(UsageError, match="this is an inpainting model") as caught:
        generate(request)
    assert caught.value.where == "--image" and "--image FILE and --mask FILE" in str(caught.value.remedy)


def test_a_denoiser_that_takes_something_else_is_refused() -> None:
    checkpoint = open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)
    configs = {part.component: checkpoint.submodels[name].load["config"] for name, part in _parts(checkpoint)}
    configs["unet"] = {**configs["unet"], "in_channels": 5}
    with pytest.raises(CheckpointError, match="takes 5 channels, but latents have 4"):
        pipeline_facts(checkpoint.family, {**configs, "scheduler": {"_class_name": "DDIMScheduler"}})


def _parts(checkpoint: Any) -> list[tuple[str, Any]]:
    return [(part.name, part) for part in checkpoint.family.parts]
