"""The commands on models that draw in few steps, and on one that a LoRA makes so: from the shell, each from one build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawing_jobs import SMALL, assert_bench_finds_both_right
from PIL import Image
from shell import ROOT, Shell
from small_lora import write_lora

pytestmark = pytest.mark.slow
MODELS = {  # workflow: steps, guidance, steps and strength from an image, scheduler
    "sd_turbo_tiny": (1, 0.0, 2, 0.5, "EulerDiscreteScheduler"),
    "sdxl_turbo_tiny": (1, 0.0, 2, 0.5, "EulerAncestralDiscreteScheduler"),
    "lcm_tiny": (4, 8.0, 4, 0.8, "LCMScheduler"),
    "lcm_sdxl_tiny": (4, 8.0, 4, 0.3, "LCMScheduler"),
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("few_steps_job"))


def settings_of(path: Path) -> dict[str, Any]:
    with Image.open(path) as image:
        settings: dict[str, Any] = json.loads(image.info["sdflow"])
    return settings


@pytest.mark.parametrize("name", MODELS)
def test_every_command_draws_as_the_model_does(shell: Shell, name: str) -> None:
    steps, guidance, from_image, strength, scheduler = MODELS[name]
    (built,) = shell.json("run", name)["pipelines"]
    assert built["verification"]["passed"] and built["verification"]["image"]["steps"] == min(steps, 3)
    drawn = built["evaluation"]["settings"]
    assert (drawn["steps"], drawn["guidance_scale"], drawn["denoiser_batch"]) == (steps, guidance, 1)
    assert built["evaluation"]["submodels"]["unet"]["inputs"]["sample"].startswith("1x"), "one row, no guidance"

    folder, quick = f"pipelines/{name}", ("--prompt", "an otter", "--seed", "1", "--threads", "1")
    settings = shell.json("generate", folder, *quick, *SMALL, "--out", "text")["settings"]
    own = {"steps": steps, "guidance_scale": guidance, "scheduler": scheduler}
    assert {key: settings[key] for key in own} == own
    assert {key: settings_of(shell.folder / "text/001-1.png")[key] for key in own} == own
    Image.new("RGB", (64, 64), (200, 30, 90)).save(shell.folder / "image.png")
    given = ("--image", str(shell.folder / "image.png"), "--out", "image")
    settings = shell.json("generate", folder, *quick, *given)["settings"]
    assert (settings["steps"], settings["strength"]) == (from_image, strength)

    (verified,) = shell.json("verify", folder, "--quick", "--fresh")["pipelines"]
    assert verified["passed"]
    measured = assert_bench_finds_both_right(shell, folder)
    assert measured["settings"]["guidance_scale"] == guidance and measured["cases"][0]["steps"] == steps
    tuned = shell.json("tune", folder, "--size", "64", "--rounds", "1", "--option", "memory_pattern")
    assert tuned["kind"] == "tune"


def test_a_lora_that_is_baked_changes_how_the_pipeline_draws_and_verifies(shell: Shell) -> None:
    shell.json("run", str(ROOT / "workflows/tiny_cpu.yaml"), "--no-evaluate", "--no-verify")
    lora = write_lora(shell.folder / "lcm-lora-sdv1-5.safetensors", ("unet",))
    arguments = ("bake", "--base", "pipelines/tiny_cpu", "--lora", f"{lora}:0.1", "--out", "pipelines/fast", "--verify")
    baked = shell.run(*arguments)
    assert baked.returncode == 0, baked.stderr
    assert (
        "lcm-lora-sdv1-5.safetensors is LCM-LoRA, so the defaults are 4 steps, no guidance, scheduler lcm"
        in baked.stdout
    )
    done = shell.run("generate", "pipelines/fast", "--prompt", "an otter", "--seed", "1", *SMALL, "--out", "fast")
    assert done.returncode == 0, done.stderr
    assert "lcm-lora-sdv1-5.safetensors is LCM-LoRA: 4 steps, no guidance, LCMScheduler" in done.stdout
    assert settings_of(shell.folder / "fast/001-1.png")["steps"] == 4
    (verified,) = shell.json("verify", "pipelines/fast", "--quick", "--fresh")["pipelines"]
    assert verified["passed"]
    assert_bench_finds_both_right(shell, "pipelines/fast")
