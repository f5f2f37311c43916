"""The shipped sample pipeline loads as it stands and shows what it is asked for, with and without its LoRAs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sdflow.samples.prompts import ScenePrompt, evaluation_set, first_latents
from sdflow.samples.score import tally

SAMPLES = Path(__file__).parents[2] / "samples"
SAMPLING = json.loads((SAMPLES / "settings.json").read_text())["sampling"]
CASES = evaluation_set()[7::24]
FEW = CASES[::3]  # an image takes two seconds on one thread: the default tests make these, the slow ones all ten


@pytest.fixture(scope="module")
def pipeline() -> Any:
    import torch
    from diffusers import StableDiffusionPipeline

    loaded = StableDiffusionPipeline.from_pretrained(SAMPLES / "shapes", torch_dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def images(pipeline: Any, cases: Sequence[ScenePrompt], **options: Any) -> list[Image.Image]:
    import torch

    latents = torch.from_numpy(np.stack([first_latents(case.seed) for case in cases]))
    settings = {"guidance_scale": SAMPLING["guidance"], "num_inference_steps": SAMPLING["steps"], **options}
    return list(pipeline([case.prompt for case in cases], latents=latents, **settings).images)


@pytest.fixture(scope="module")
def base(pipeline: Any) -> list[Image.Image]:
    return images(pipeline, FEW)


@pytest.fixture(scope="module")
def with_loras(pipeline: Any, base: list[Image.Image]) -> Any:
    for name in ("stripes", "outline"):
        pipeline.load_lora_weights(SAMPLES / "loras", weight_name=f"{name}.safetensors", adapter_name=name)
    return pipeline


def test_it_is_small_and_has_the_parts_of_sd15(pipeline: Any) -> None:
    weights = list((SAMPLES / "shapes").rglob("*.safetensors"))
    assert sum(file.stat().st_size for file in weights) <= 25_000_000
    parts = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    assert 5e6 <= sum(p.numel() for part in parts for p in part.parameters()) <= 15e6
    assert all(file.stat().st_size < 1_000_000 for file in (SAMPLES / "loras").glob("*.safetensors"))


def test_it_shows_the_colour_and_shape_asked_for(base: list[Image.Image]) -> None:
    result = tally(FEW, base)
    assert result.colour_and_kind >= 0.75
    assert (result.stripes, result.outline) == (0.0, 0.0)


@pytest.mark.slow
def test_it_shows_what_is_asked_for_but_not_without_its_prompt_or_guidance(pipeline: Any) -> None:
    result = tally(CASES, images(pipeline, CASES))
    assert result.colour_and_kind >= 0.8  # ten images; the full set's score is in samples/README.md
    assert (result.stripes, result.outline) == (0.0, 0.0)
    silent = [replace(case, prompt="") for case in CASES]
    assert tally(CASES, images(pipeline, silent)).colour_and_kind <= 0.4
    assert tally(CASES, images(pipeline, CASES, guidance_scale=1.0)).colour_and_kind <= 0.6


def test_at_scale_0_the_images_equal_the_base(with_loras: Any, base: list[Image.Image]) -> None:
    with_loras.set_adapters(["stripes", "outline"], [0.0, 0.0])
    for before, after in zip(base[:1], images(with_loras, FEW[:1]), strict=True):
        assert np.abs(np.asarray(before, int) - np.asarray(after, int)).max() <= 1


@pytest.mark.parametrize(("scales", "stripes", "outline"), [((1, 0), True, False), ((0, 1), False, True)])
def test_each_lora_shows_its_own_style_alone(
    with_loras: Any, scales: tuple[float, float], stripes: bool, outline: bool
) -> None:
    with_loras.set_adapters(["stripes", "outline"], list(scales))
    result = tally(FEW, images(with_loras, FEW))
    # One image of the four may err: outline, taught beside stripes, shows some in a few percent (samples/README.md).
    assert (result.stripes >= 0.75) if stripes else (result.stripes <= 0.25)
    assert (result.outline >= 0.75) if outline else (result.outline <= 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scales", "stripes", "outline"), [((1, 0), True, False), ((0, 1), False, True), ((1, 1), True, True)]
)
def test_each_lora_shows_its_style_and_both_show_both(
    with_loras: Any, scales: tuple[float, float], stripes: bool, outline: bool
) -> None:
    with_loras.set_adapters(["stripes", "outline"], list(scales))
    result = tally(CASES, images(with_loras, CASES))
    assert (result.stripes >= 0.8) if stripes else (result.stripes <= 0.1)
    assert (result.outline >= 0.8) if outline else (result.outline <= 0.1)


def test_the_loras_are_in_diffusers_and_in_kohya_format() -> None:
    from safetensors import safe_open

    def keys(name: str) -> list[str]:
        with safe_open(SAMPLES / "loras" / f"{name}.safetensors", "np") as file:
            return list(file.keys())

    assert all(key.startswith("unet.") and ".lora_" in key for key in keys("stripes"))
    outline = keys("outline")
    assert {key.rsplit(".", 2)[-2] for key in outline if key.endswith("weight")} == {"lora_down", "lora_up"}
    assert {key[:9] for key in outline} == {"lora_unet", "lora_te_t"}
    assert sum(key.endswith(".alpha") for key in outline) == len(outline) // 3
