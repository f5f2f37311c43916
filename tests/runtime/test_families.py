"""Every family draws what diffusers' own pipelines draw: from text, from an image, into a mask (fp32 on the CPU).

The graphs are converted and not fused: what the passes do to them is held elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from beside_diffusers import PROMPT, SIZE, TOLERANCE, assert_equal, differ, generator, of_diffusers, put_together
from converted import Converted
from original_layout import vae_tensors
from PIL import Image
from safetensors.torch import save_file

from sdflow.errors import UsageError
from sdflow.runtime.pipeline import Pipeline
from sdflow.sources import PlainDigests, load_module, load_pipeline, open_checkpoint

SETTINGS: dict[str, Any] = {"num_inference_steps": 4, "output_type": "np"}
KINDS = {
    "sdxl-tiny": (
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
    ),
    "sd21-tiny": ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
}
WORDS: dict[str, dict[str, Any]] = {
    "with guidance and nothing else": {},
    "without guidance": {"guidance_scale": 1.0},
    "with a negative prompt": {"negative_prompt": "blurry"},
    "with an empty negative prompt": {"negative_prompt": ""},
}
FEW_WORDS = ("without guidance", "with a negative prompt")
SIZES: dict[str, dict[str, Any]] = {
    "two prompts": {"prompt_2": "oil on canvas", "negative_prompt": "blurry", "negative_prompt_2": "grey"},
    "sizes": {"original_size": (300, 200), "crops_coords_top_left": (16, 8), "target_size": (1024, 768)},
}


class Built:
    """A small pipeline of an architecture: our folder on ONNX Runtime, and diffusers' modules."""

    def __init__(self, architecture: str, root: Path, converted: Converted, **components: str) -> None:
        checkpoint = open_checkpoint(
            f"synthetic:{architecture}", digests=PlainDigests(), download=False, components=components
        )
        self.architecture, self.folder = architecture, root / "pipeline"
        put_together(checkpoint, converted, self.folder, checkpoint.submodels)
        self.ours = Pipeline.load(self.folder, "cpu", threads=1)
        self.parts: Mapping[str, Any] = load_pipeline(checkpoint).components

    def theirs(self, kind: int) -> Any:
        return of_diffusers(KINDS[self.architecture][kind], self.parts)


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(request.param, tmp_path_factory.mktemp(request.param), converted)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    rows, columns = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    return Image.fromarray((np.stack([rows, columns, 1 - rows], axis=-1) * 255).astype("uint8"))


@pytest.fixture(scope="module")
def mask() -> Image.Image:
    return Image.fromarray(np.where(np.arange(SIZE) >= SIZE // 2, 255, 0)[None].repeat(SIZE, 0).astype("uint8"))


def latents_of(built: Built, image: Image.Image) -> torch.Tensor:
    """What diffusers encodes the image to, without the noise that it would draw for that."""
    vae = built.parts["vae"]
    pixels = torch.from_numpy(np.asarray(image) / 127.5 - 1).float().permute(2, 0, 1)[None]
    with torch.no_grad():
        encoded: torch.Tensor = vae.encode(pixels).latent_dist.mode()
    return encoded * vae.config.scaling_factor


@pytest.mark.parametrize("words", WORDS)
def test_text_to_image_equals_diffusers(built: Built, words: str) -> None:
    settings = {**SETTINGS, **WORDS[words], "height": SIZE, "width": 2 * SIZE}
    latents = torch.randn(built.ours.latents_shape(1, SIZE, 2 * SIZE), generator=generator())
    expected = built.theirs(0)(PROMPT, latents=latents, **settings).images
    assert_equal(built.ours(PROMPT, latents=latents, **settings).images, expected)


def test_guidances_halves_on_two_devices_equal_diffusers(built: Built) -> None:
    """Both devices are this CPU."""
    if built.architecture != "sdxl-tiny":
        pytest.skip("one family is enough here: Stable Diffusion's is in test_halves.py")
    settings = {**SETTINGS, "negative_prompt": "blurry", "height": SIZE, "width": 2 * SIZE}
    latents = torch.randn(built.ours.latents_shape(1, SIZE, 2 * SIZE), generator=generator())
    expected = built.theirs(0)(PROMPT, latents=latents, **settings).images
    two = Pipeline.load(built.folder, "cpu", threads=1, devices=2)
    assert_equal(two(PROMPT, latents=latents, **settings).images, expected)


@pytest.mark.parametrize(
    "words", [pytest.param(each, marks=() if each in FEW_WORDS else pytest.mark.slow) for each in WORDS]
)
def test_clip_skip_leaves_layers_out_of_the_prompt_alone_as_diffusers_does(
    built: Built, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # diffusers 0.42 still looks for the part that transformers 5 made the whole.
    monkeypatch.setattr(transformers.CLIPTextModel, "text_model", property(lambda self: self), raising=False)
    settings = {**SETTINGS, **WORDS[words], "height": SIZE, "width": SIZE, "num_inference_steps": 2}
    latents = torch.randn(built.ours.latents_shape(1, SIZE, SIZE), generator=generator())
    expected = built.theirs(0)(PROMPT, latents=latents, clip_skip=1, **settings).images
    assert_equal(built.ours(PROMPT, latents=latents, clip_skip=1, **settings).images, expected)
    assert differ(built.ours(PROMPT, latents=latents, **settings).images, expected)


def test_with_another_vae_the_image_equals_diffusers_with_that_vae(
    built: Built, converted: Converted, tmp_path: Path
) -> None:
    """The VAE comes in one file, by the original names without a prefix; diffusers gets the module that it was made of."""
    if built.architecture != "sdxl-tiny":
        pytest.skip("one family is enough: the VAE is exchanged in the same way")
    other = open_checkpoint("synthetic:sdxl-tiny?seed=1", digests=PlainDigests(), download=False)
    vae = load_module("vae_decoder", other.submodels["vae_decoder"].load)
    save_file({name: each.contiguous() for name, each in vae_tensors(vae).items()}, tmp_path / "sdxl_vae.safetensors")
    changed = Built(built.architecture, tmp_path / "changed", converted, vae=str(tmp_path / "sdxl_vae.safetensors"))
    theirs = built.theirs(0)
    theirs.vae = vae
    settings = {**SETTINGS, "height": SIZE, "width": 2 * SIZE}
    latents = torch.randn(built.ours.latents_shape(1, SIZE, 2 * SIZE), generator=generator())
    drawn = changed.ours(PROMPT, latents=latents, **settings).images
    assert_equal(drawn, theirs(PROMPT, latents=latents, **settings).images)
    plain = built.ours(PROMPT, latents=latents, **settings).images
    assert np.abs(plain - drawn).max() > 10 * TOLERANCE, "the VAE changes nothing"


@pytest.mark.parametrize("words", SIZES)
def test_a_second_prompt_and_sizes_equal_diffusers_or_are_refused(built: Built, words: str) -> None:
    settings = {**SETTINGS, "height": SIZE, "width": SIZE}
    if not built.ours.family.arguments:
        with pytest.raises(UsageError, match=f"has no argument {min(set(SIZES[words]) - {'negative_prompt'})}"):
            built.ours(PROMPT, **settings, **SIZES[words])
        return
    expected = built.theirs(0)(PROMPT, generator=generator(), **settings, **SIZES[words]).images
    drawn = built.ours(PROMPT, generator=generator(), **settings, **SIZES[words]).images
    assert_equal(drawn, expected)
    plain = built.ours(PROMPT, generator=generator(), **settings).images
    assert np.abs(plain - drawn).max() > 10 * TOLERANCE, "the argument changes nothing"


@pytest.mark.once("built")
def test_several_images_of_several_prompts_equal_diffusers(built: Built) -> None:
    prompts = [PROMPT, "a red house"]
    settings = {**SETTINGS, "height": SIZE, "width": SIZE, "num_images_per_prompt": 2, "num_inference_steps": 2}
    expected = built.theirs(0)(prompts, generator=generator(), **settings).images
    assert_equal(built.ours(prompts, generator=generator(), **settings).images, expected)


def test_image_to_image_equals_diffusers(built: Built, image: Image.Image) -> None:
    settings = {**SETTINGS, "strength": 0.6}
    expected = built.theirs(1)(PROMPT, image=latents_of(built, image), generator=generator(), **settings).images
    assert_equal(built.ours(PROMPT, image, generator=generator(), **settings).images, expected)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.once("built")
def test_inpainting_equals_diffusers(built: Built, image: Image.Image, mask: Image.Image, strength: float) -> None:
    # diffusers' pipelines for inpainting have another guidance by default than the others of their family
    settings = {**SETTINGS, "strength": strength, "height": SIZE, "width": SIZE, "guidance_scale": 7.5}
    latents = latents_of(built, image)
    given = {"image": latents, "masked_image_latents": latents, "mask_image": mask}
    expected = built.theirs(2)(PROMPT, **given, generator=generator(), **settings).images
    assert_equal(built.ours(PROMPT, image, mask, whole=True, generator=generator(), **settings).images, expected)


@pytest.mark.once("built")
def test_with_little_memory_the_image_is_the_same(built: Built) -> None:
    frugal = Pipeline.load(built.folder, "cpu", threads=1, low_memory=True)
    settings = {**SETTINGS, "height": SIZE, "width": SIZE, "num_inference_steps": 2}
    expected = built.ours(PROMPT, generator=generator(), **settings).images
    assert_equal(frugal(PROMPT, generator=generator(), **settings).images, expected)
