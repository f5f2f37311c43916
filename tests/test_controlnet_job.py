"""The commands on a pipeline with ControlNets, from the shell, from one build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from shell import ROOT, Shell
from small_lora import write_lora

from sdflow.manifest import read_manifest

pytestmark = pytest.mark.slow
WORKFLOW = str(ROOT / "workflows/tiny_controlnet_cpu.yaml")
FOLDER = "pipelines/tiny_controlnet_cpu"
NETS = {"controlnet_depth", "controlnet_edges"}
DRAW = ("--prompt", "an otter", "--steps", "2", "--seed", "1", "--height", "64", "--width", "64", "--threads", "1")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("controlnet_job"))
    Image.radial_gradient("L").resize((64, 64)).save(shell.folder / "edges.png")
    return shell


@pytest.fixture(scope="module")
def first(shell: Shell) -> Any:
    (pipeline,) = shell.json("run", WORKFLOW, "--no-verify")["pipelines"]
    return pipeline


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        assert image.size == (64, 64)
        return image.tobytes()


def drawn(shell: Shell, name: str, *more: str, folder: str = FOLDER) -> bytes:
    shell.json("generate", folder, *DRAW, *more, "--out", name)
    return pixels(shell.folder / name / "001-1.png")


def test_two_nets_share_one_graph_and_each_has_weights_of_its_own(shell: Shell, first: Any) -> None:
    steps = [step for step in first["steps"] if step["step"].split("/")[1] in NETS]
    assert [step["outcome"] for step in steps].count("built") == len(steps) - 2, "the second net's graph is the first's"
    assert {step["pass"] for step in steps if step["outcome"] == "cached"} == {
        "OnnxConversion",
        "OrtTransformersOptimization",
    }
    assert set(first["evaluation"]["submodels"]) >= NETS


def test_generate_follows_the_images_that_it_is_given(shell: Shell, first: Any) -> None:
    plain = drawn(shell, "plain")
    controlled = drawn(shell, "edges", "--control", "edges=edges.png:0.8:0:0.6")
    both = drawn(shell, "both", "--control", "edges=edges.png", "--control", "depth=edges.png:0.5")
    assert len({plain, controlled, both}) == 3
    assert drawn(shell, "again") == plain
    with Image.open(shell.folder / "edges/001-1.png") as image:
        told = json.loads(image.info["sdflow"])["controls"]["edges"]
    assert (told["name"], told["scale"], told["start"], told["end"]) == ("edges.png", 0.8, 0.0, 0.6)


def test_a_net_that_is_not_there_is_told_with_those_that_are(shell: Shell, first: Any) -> None:
    done = shell.run("generate", FOLDER, *DRAW, "--control", "pose=edges.png")
    assert done.returncode == 2 and "depth, edges" in done.stderr and "Traceback" not in done.stderr


def test_the_nets_are_verified_with_the_image_that_they_change(shell: Shell, first: Any) -> None:
    (verified,) = shell.json("verify", FOLDER, "--quick", "--fresh")["pipelines"]
    assert verified["passed"] and set(verified["submodels"]) >= NETS
    assert len(verified["submodels"]["controlnet_edges"]["outputs"]) == 13


def test_bake_keeps_the_nets_and_builds_only_what_the_lora_changes(shell: Shell, first: Any) -> None:
    write_lora(shell.folder / "ink.safetensors")
    shell.json("bake", "--base", FOLDER, "--lora", "ink.safetensors", "--out", "baked/ink")
    before, after = (read_manifest(shell.folder / folder).artifacts for folder in (FOLDER, "baked/ink"))
    assert {name for name in before if before[name] != after[name]} == {"unet", "text_encoder"}
    assert set(after) >= NETS
    control = ("--control", "edges=edges.png")
    assert drawn(shell, "inked", *control, folder="baked/ink") != drawn(shell, "uninked", *control)


def test_bench_and_tune_run_on_it(shell: Shell, first: Any) -> None:
    settings = ("--size", "64", "--steps", "2", "--rounds", "1", "--threads", "1")
    measured = shell.json("bench", FOLDER, *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}
    tuned = shell.json("tune", FOLDER, "--size", "64", "--steps", "1", "--rounds", "1", "--option", "memory_pattern")
    assert tuned["kind"] == "tune"
