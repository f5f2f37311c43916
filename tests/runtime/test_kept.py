"""What a mask keeps is the image's own, pixel for pixel: from Python, from the command line, and in previews."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from typer.testing import CliRunner

from sdflow.cli.app import app
from sdflow.errors import UsageError
from sdflow.runtime.drawing.kept import EXTENT, blurred
from sdflow.runtime.drawing.preview import Preview
from sdflow.runtime.pipeline import Pipeline

SIZE = 64
EDGE = SIZE // 2
PROMPT = "a horse"
SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "strength": 0.8}


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Path) -> Iterator[Pipeline]:
    yield Pipeline.load(tiny_pipeline, "cpu", threads=1, checker=False)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    """Of no smooth colours, which a VAE could not give back."""
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def mask() -> Image.Image:
    """White, that is to be drawn, in the right half."""
    return Image.fromarray(np.where(np.arange(SIZE) >= EDGE, 255, 0)[None].repeat(SIZE, 0).astype("uint8"))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def pixels(image: Any) -> np.ndarray:
    return np.asarray(image, np.int16)


def test_what_the_mask_keeps_is_exactly_the_images_own_and_the_rest_is_what_the_vae_gives(
    pipeline: Pipeline, image: Image.Image, mask: Image.Image
) -> None:
    given = {**SETTINGS, "generator": generator()}
    kept = pixels(pipeline(PROMPT, image, mask, **given).images[0])
    whole = pixels(pipeline(PROMPT, image, mask, whole=True, **{**given, "generator": generator()}).images[0])
    np.testing.assert_array_equal(kept[:, :EDGE], pixels(image)[:, :EDGE])
    np.testing.assert_array_equal(kept[:, EDGE:], whole[:, EDGE:])
    assert np.abs(whole - pixels(image))[:, :EDGE].max() > 20, "the VAE changes nothing, so that this proves nothing"


def test_what_is_kept_is_the_image_as_it_is_resized(pipeline: Pipeline, image: Image.Image, mask: Image.Image) -> None:
    small = image.resize((40, 48))
    drawn = pipeline(PROMPT, small, mask, height=SIZE, width=SIZE, generator=generator(), **SETTINGS).images[0]
    expected = small.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(pixels(drawn)[:, :EDGE], pixels(expected)[:, :EDGE])


def test_several_images_keep_each_their_own(pipeline: Pipeline, image: Image.Image, mask: Image.Image) -> None:
    turned = image.transpose(Image.Transpose.ROTATE_90)
    other = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    drawn = pipeline([PROMPT, "a cat"], [image, turned], [mask, other], generator=generator(), **SETTINGS).images
    np.testing.assert_array_equal(pixels(drawn[0])[:, :EDGE], pixels(image)[:, :EDGE])
    np.testing.assert_array_equal(pixels(drawn[1])[:, EDGE:], pixels(turned)[:, EDGE:])
    twice = pipeline(PROMPT, image, mask, num_images_per_prompt=2, generator=generator(), **SETTINGS).images
    for each in twice:
        np.testing.assert_array_equal(pixels(each)[:, :EDGE], pixels(image)[:, :EDGE])


def test_a_soft_edge_fades_and_what_lies_beyond_it_is_kept(
    pipeline: Pipeline, image: Image.Image, mask: Image.Image
) -> None:
    blur, given = 2.0, {**SETTINGS, "output_type": "np"}
    soft = pipeline(PROMPT, image, mask, mask_blur=blur, generator=generator(), **given).images[0]
    whole = pipeline(PROMPT, image, mask, whole=True, generator=generator(), **given).images[0]
    own, reach = pixels(image) / 255, int(EXTENT * blur)
    np.testing.assert_allclose(soft[:, : EDGE - reach], own[:, : EDGE - reach], atol=1e-6)
    np.testing.assert_allclose(soft[:, EDGE + reach :], whole[:, EDGE + reach :], atol=1e-6)
    weight = blurred(torch.from_numpy(np.asarray(mask) / 255).float()[None, None], blur)[0, 0, :, :, None].numpy()
    np.testing.assert_allclose(soft, weight * whole + (1 - weight) * own, atol=1e-5)
    assert ((weight > 0.05) & (weight < 0.95)).any()


def test_the_blur_is_a_gauss_filter_of_that_many_pixels() -> None:
    hard = Image.new("L", (96, 96))
    hard.paste(255, (30, 20, 70, 80))
    expected = np.asarray(hard.filter(ImageFilter.GaussianBlur(5)), np.float32) / 255
    found = blurred(torch.from_numpy(np.asarray(hard)).float()[None, None] / 255, 5.0)[0, 0].numpy()
    assert np.abs(found - expected).max() < 0.03, "Pillow's is an approximation by boxes"
    assert blurred(torch.ones(1, 1, 8, 8), 40.0).min() > 0.999, "the borders do not darken it"


def test_previews_show_what_is_kept(pipeline: Pipeline, image: Image.Image, mask: Image.Image) -> None:
    shown: list[Preview] = []
    pipeline(PROMPT, image, mask, callback_on_preview=shown.append, generator=generator(), **SETTINGS)
    (first, *_) = shown[0].images()
    scale = pipeline.latents.scale
    assert first.size == (SIZE // scale, SIZE // scale)
    left = first.size[0] // 2
    blocks = pixels(image).reshape(first.size[1], scale, first.size[0], scale, 3).mean((1, 3))
    np.testing.assert_allclose(pixels(first)[:, :left], blocks[:, :left], atol=1)


def test_latents_to_start_from_have_no_pixels_to_keep(pipeline: Pipeline, mask: Image.Image) -> None:
    latents = torch.randn(1, 4, *(SIZE // pipeline.latents.scale,) * 2, generator=generator())
    given = {**SETTINGS, "output_type": "np"}
    one, other = (
        pipeline(PROMPT, latents, mask, whole=whole, generator=generator(), **given).images for whole in (False, True)
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("given", "where"),
    [({"mask_blur": -1.0}, "mask_blur"), ({"mask_blur": 1e9}, "mask_blur"), ({"mask_blur": float("nan")}, "mask_blur")],
)
def test_a_blur_that_there_cannot_be_is_refused(
    pipeline: Pipeline, image: Image.Image, mask: Image.Image, given: dict[str, Any], where: str
) -> None:
    with pytest.raises(UsageError) as caught:
        pipeline(PROMPT, image, mask, **given, **SETTINGS)
    assert caught.value.where == where
    with pytest.raises(UsageError, match="no mask to blur"):
        pipeline(PROMPT, image, mask_blur=2.0, **SETTINGS)
    with pytest.raises(UsageError, match="no edge"):
        pipeline(PROMPT, image, mask, mask_blur=2.0, whole=True, **SETTINGS)


def test_generate_keeps_it_too(tiny_pipeline: Path, image: Image.Image, mask: Image.Image, tmp_path: Path) -> None:
    image.save(tmp_path / "image.png")
    mask.save(tmp_path / "mask.png")

    def draw(out: str, *options: str) -> Any:
        files = ["--image", str(tmp_path / "image.png"), "--mask", str(tmp_path / "mask.png")]
        command = [
            "generate",
            str(tiny_pipeline),
            "-p",
            PROMPT,
            "--steps",
            "2",
            "--seed",
            "1",
            "--out",
            str(tmp_path / out),
        ]
        result = CliRunner().invoke(app, [*command, *files, "--no-safety-checker", *options])
        assert result.exit_code == 0, result.output
        return Image.open(tmp_path / out / "001-1.png")

    kept, soft, whole = draw("kept"), draw("soft", "--mask-blur", "3"), draw("whole", "--whole")
    own = pixels(image)
    np.testing.assert_array_equal(pixels(kept)[:, :EDGE], own[:, :EDGE])
    np.testing.assert_array_equal(pixels(soft)[:, : EDGE - 8], own[:, : EDGE - 8])
    assert (pixels(soft)[:, EDGE - 8 : EDGE] != own[:, EDGE - 8 : EDGE]).any()
    assert np.abs(pixels(whole) - own)[:, :EDGE].max() > 20
    assert '"mask_blur": 3' in soft.info["sdflow"] and '"whole": true' in whole.info["sdflow"]


@pytest.mark.parametrize("option", [["--whole"], ["--mask-blur", "3"]])
def test_generate_refuses_them_without_a_mask(tiny_pipeline: Path, tmp_path: Path, option: list[str]) -> None:
    result = CliRunner().invoke(app, ["generate", str(tiny_pipeline), "-p", PROMPT, "--out", str(tmp_path), *option])
    assert isinstance(result.exception, UsageError) and result.exception.where == option[0]
    assert "Add --mask FILE" in str(result.exception.remedy)
