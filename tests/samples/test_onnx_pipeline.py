"""The sample pipeline built for the CPU shows what PyTorch's shows, its baked LoRAs show, and what is left out is missed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_builds import KeptBuilds
from PIL import Image
from started_python import Command

from sdflow.samples.prompts import ScenePrompt, evaluation_set, first_latents
from sdflow.samples.score import Score, tally

ROOT = Path(__file__).parents[2]
SAMPLING = json.loads((ROOT / "samples/settings.json").read_text())["sampling"]
CASES = evaluation_set()[7::24]
FEW = CASES[:4]


@pytest.fixture(scope="module")
def pipelines(sdflow: Command, cache_of: KeptBuilds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The pipelines of two workflows, loaded: name -> Pipeline. `tests/jobs/test_terminal.py` verifies the first."""
    from sdflow.runtime.pipeline import Pipeline

    folder = tmp_path_factory.mktemp("shapes")
    cache_of("shapes_cpu", folder)
    for workflow in ("shapes_cpu", "shapes_lora_cpu"):
        done = sdflow("run", str(ROOT / f"workflows/{workflow}.yaml"), "--no-evaluate", "--no-verify", folder=folder)
        assert done.returncode == 0, done.stderr
    found = {path.name.removeprefix("shapes_lora_cpu-"): path for path in (folder / "pipelines").iterdir()}
    assert found.keys() == {"shapes_cpu", "scale_0", "scale_0.5", "scale_1"}
    return {name: Pipeline.load(path, "cpu", threads=1) for name, path in found.items() if name != "scale_0.5"}


def draw(pipeline: Any, cases: Sequence[ScenePrompt], **options: Any) -> list[Image.Image]:
    """The images of the cases, each from its own latents; `pipeline`: PyTorch's or a built one."""
    import torch

    latents = torch.from_numpy(np.stack([first_latents(case.seed) for case in cases]))
    settings = {"guidance_scale": SAMPLING["guidance"], "num_inference_steps": SAMPLING["steps"], **options}
    return list(pipeline([case.prompt for case in cases], latents=latents, **settings).images)


@pytest.fixture(scope="module")
def base(pipelines: dict[str, Any]) -> list[Image.Image]:
    return draw(pipelines["shapes_cpu"], CASES)


@pytest.fixture(scope="module")
def by_pytorch() -> list[Image.Image]:
    import torch
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(ROOT / "samples/shapes", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return draw(pipeline, CASES)


def shares(score: Score) -> dict[str, float]:
    return {name: value for name, value in vars(score).items() if name != "cases"}


def assert_shown(score: Score) -> None:
    assert score.colour_and_kind >= 0.8


def assert_both_styles(score: Score) -> None:
    assert score.stripes >= 0.75
    assert score.outline >= 0.75


def test_its_score_equals_pytorchs_within_two_points(base: list[Image.Image], by_pytorch: list[Image.Image]) -> None:
    ours, theirs = shares(tally(CASES, base)), shares(tally(CASES, by_pytorch))
    assert {name: value for name, value in ours.items() if abs(value - theirs[name]) > 0.02} == {}
    assert_shown(tally(CASES, base))


def test_without_prompt_or_guidance_it_is_not_what_was_asked_for(pipelines: dict[str, Any]) -> None:
    pipeline = pipelines["shapes_cpu"]
    for images in (
        draw(pipeline, [replace(case, prompt="") for case in FEW]),
        draw(pipeline, FEW, guidance_scale=1.0),
    ):
        with pytest.raises(AssertionError):
            assert_shown(tally(FEW, images))


def test_at_scale_0_the_images_equal_the_base(pipelines: dict[str, Any], base: list[Image.Image]) -> None:
    for before, after in zip(base, draw(pipelines["scale_0"], FEW[:2]), strict=False):
        assert np.abs(np.asarray(before, int) - np.asarray(after, int)).max() <= 1


def test_two_baked_loras_show_both_styles_and_are_missed_when_dropped(
    pipelines: dict[str, Any], base: list[Image.Image]
) -> None:
    assert_both_styles(tally(FEW, draw(pipelines["scale_1"], FEW)))
    with pytest.raises(AssertionError):
        assert_both_styles(tally(FEW, base[: len(FEW)]))
