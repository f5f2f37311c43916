"""Files of images say how to draw them again: those that Python saves, and those of `sdflow generate`, which reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from sdflow.cli.app import app
from sdflow.runtime.draw_request import GenerateRequest
from sdflow.runtime.files.image_text_reading import read_image_settings
from sdflow.runtime.files.images import write_png
from sdflow.runtime.generate import generate
from sdflow.runtime.pipeline import Pipeline

SMALL: dict[str, Any] = {"height": 64, "width": 64}


@pytest.fixture(scope="module")
def pipe(tiny_pipeline: Path) -> Pipeline:
    return Pipeline.load(tiny_pipeline, "cpu", threads=1)


def seeds(*numbers: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in numbers]


def difference(one: Any, other: Any) -> int:
    pixels = [np.asarray(Image.open(each) if isinstance(each, Path | str) else each, int) for each in (one, other)]
    return int(np.abs(pixels[0] - pixels[1]).max())


def test_an_image_saved_from_python_is_drawn_again_from_its_file(pipe: Pipeline, tmp_path: Path) -> None:
    options = {**SMALL, "num_inference_steps": 2, "guidance_scale": 6.0, "clip_skip": 1, "prompt_syntax": "a1111"}
    drawn = pipe(["a (red:1.3) cat", "a dog"], negative_prompt="ugly", generator=seeds(7, 2**40), **options).images
    for image, prompt, seed in zip(drawn, ("a (red:1.3) cat", "a dog"), (7, 2**40), strict=True):
        image.save(tmp_path / "image.png")
        found = read_image_settings(tmp_path / "image.png")
        assert (found.prompt, found.seed, found.settings["negative_prompt"]) == (prompt, seed, "ugly")
        assert found.settings["scheduler"] == "pndm" and found.settings["clip_skip"] == 1
        again = pipe(found.prompt, generator=seeds(seed), **found.call_arguments()).images[0]
        assert difference(image, again) <= 1
    text = json.loads(Image.open(tmp_path / "image.png").info["sdflow"])
    assert (text["pipeline"], text["target"]) == ("tiny", "cpu") and "text_encoder" in text["artifacts"]
    drawn[0].save(tmp_path / "image.jpg")
    assert Image.open(tmp_path / "image.jpg").size == (64, 64)


def test_what_was_given_besides_and_an_unknown_seed_are_in_the_text(pipe: Pipeline) -> None:
    start = pipe("a", num_inference_steps=1, **SMALL).images[0]
    assert "seed" not in json.loads(start.info["sdflow"])
    mask = Image.new("L", (64, 64), 255)
    drawn = pipe("a", start, mask, strength=0.5, mask_blur=2, num_inference_steps=4, **SMALL).images[0]
    text = json.loads(drawn.info["sdflow"])
    assert text["strength"] == 0.5 and text["mask_blur"] == 2 and {"image", "mask"} <= text.keys()
    assert "Denoising strength: 0.5, Mask blur: 2" in drawn.info["parameters"]
    assert json.loads(drawn.info["invokeai_metadata"])["strength"] == 0.5


def command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_generate_draws_an_image_again_from_its_file(tiny_pipeline: Path, tmp_path: Path) -> None:
    request = GenerateRequest(
        tiny_pipeline, ["a cat"], tmp_path / "first", seed=5, steps=2, scheduler="euler_a", clip_skip=1, threads=1,
        negative_prompt="ugly", **SMALL,
    )  # fmt: skip
    first = generate(request).images[0].file
    same = command(tiny_pipeline, "--from", first, "--out", tmp_path / "same", "--threads", "1", "--images", "2")
    assert same.exit_code == 0, same.output
    assert difference(first, tmp_path / "same/001-5.png") <= 1 < difference(first, tmp_path / "same/002-6.png")
    assert read_image_settings(first).settings == read_image_settings(tmp_path / "same/001-5.png").settings


def test_an_image_that_was_drawn_from_another_asks_for_that(tiny_pipeline: Path, tmp_path: Path) -> None:
    write_png(Image.new("RGB", (64, 64)), tmp_path / "drawn.png", {"prompt": "a", "image": {"name": "start.png"}})
    refused = command(tiny_pipeline, "--from", tmp_path / "drawn.png")
    assert "also generated from: image" in str(refused.exception) and "--image FILE" in str(refused.exception)
    unknown = command(tiny_pipeline, "--from", tmp_path / "drawn.png", "--image", tmp_path / "start.png")
    assert "start.png" in str(unknown.exception), "what the command line names is read"
