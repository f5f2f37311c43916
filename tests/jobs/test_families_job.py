"""The commands on a family that is not the first: Stable Diffusion XL, from the shell, from one build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from shell import Shell

pytestmark = pytest.mark.slow
WORKFLOW = "sdxl_tiny"
FOLDER = "pipelines/sdxl_tiny"
PARTS = {"text_encoder", "text_encoder_2", "unet", "vae_encoder", "vae_decoder"}
DRAW = ("--prompt", "an otter", "--steps", "2", "--seed", "1", "--height", "64", "--width", "64", "--threads", "1")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("families_job"))


@pytest.fixture(scope="module")
def first(shell: Shell) -> Any:
    (pipeline,) = shell.json("run", WORKFLOW, "--no-verify")["pipelines"]
    return pipeline


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        assert image.size == (64, 64)
        return image.tobytes()


def test_the_workflow_builds_five_submodels_and_draws(shell: Shell, first: Any) -> None:
    assert {step["outcome"] for step in first["steps"]} == {"built"}
    assert set(first["evaluation"]["submodels"]) == PARTS
    assert not (shell.folder / "recorder/reached").exists(), "nothing was looked up on the network"
    with Image.open(shell.folder / "results/sdxl_tiny.png") as image:
        assert image.size == (64, 64)


def test_a_second_run_runs_no_pass_and_another_seed_only_writes_weights(shell: Shell, first: Any) -> None:
    quick = ("--no-evaluate", "--no-verify")
    (again,) = shell.json("run", WORKFLOW, *quick)["pipelines"]
    assert {step["outcome"] for step in again["steps"]} == {"cached"}
    seeded = ("--set", "model=synthetic:sdxl-tiny?seed=1", "--out", "seeded")
    (other,) = shell.json("run", WORKFLOW, *quick, *seeded)["pipelines"]
    built = [step for step in other["steps"] if step["outcome"] == "built"]
    assert {step["pass"] for step in built} == {"BindWeights"} and len(built) == len(PARTS)


def test_plan_and_explain_name_both_text_encoders(shell: Shell, first: Any) -> None:
    steps = shell.json("plan", WORKFLOW)["steps"]
    assert {step["state"] for step in steps} == {"cached"}
    assert {step["step"].split("/")[1] for step in steps} == PARTS
    changed = shell.json("explain", WORKFLOW, "--set", "text_encoder_2.passes.0.target_opset=16")["steps"]
    assert {step["step"].split("/")[1] for step in changed if step["reasons"]} == {"text_encoder_2"}


def test_generate_takes_what_xl_takes_besides(shell: Shell, first: Any) -> None:
    words = ("--prompt-2", "oil on canvas", "--original-size", "512x512", "--crop", "0x0")
    settings = shell.json("generate", FOLDER, *DRAW, *words, "--out", "with")["settings"]
    shell.json("generate", FOLDER, *DRAW, "--out", "without")
    assert settings["prompt_2"] == "oil on canvas" and settings["original_size"] == [512, 512]
    assert settings["guidance_scale"] == 5.0, "diffusers' own for XL"
    drawn = pixels(shell.folder / "with/001-1.png")
    assert drawn != pixels(shell.folder / "without/001-1.png")
    with Image.open(shell.folder / "with/001-1.png") as image:
        assert json.loads(image.info["sdflow"])["prompt_2"] == "oil on canvas"


def test_generate_starts_from_an_image_and_keeps_what_is_behind_the_mask(shell: Shell, first: Any) -> None:
    Image.new("RGB", (64, 64), (200, 30, 90)).save(shell.folder / "image.png")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 64, 32))
    mask.save(shell.folder / "mask.png")
    given = ("--image", str(shell.folder / "image.png"))
    settings = shell.json("generate", FOLDER, *DRAW, *given, "--out", "from_image")["settings"]
    assert settings["image"]["name"] == "image.png"
    shell.json("generate", FOLDER, *DRAW, *given, "--mask", str(shell.folder / "mask.png"), "--out", "masked")
    assert pixels(shell.folder / "masked/001-1.png") != pixels(shell.folder / "from_image/001-1.png")


def test_the_pipeline_is_verified(shell: Shell, first: Any) -> None:
    (verified,) = shell.json("verify", FOLDER, "--quick", "--fresh")["pipelines"]
    assert verified["passed"] and set(verified["submodels"]) == PARTS


def test_bench_holds_both_engines_to_pytorch_and_tune_chooses(shell: Shell, first: Any) -> None:
    settings = ("--size", "64", "--steps", "2", "--rounds", "1", "--threads", "1")
    measured = shell.json("bench", FOLDER, *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}
    tuned = shell.json("tune", FOLDER, "--size", "64", "--steps", "1", "--rounds", "1", "--option", "memory_pattern")
    assert tuned["kind"] == "tune"
