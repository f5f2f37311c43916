"""The commands on a pipeline with ControlNets, from the shell, from one build."""

from __future__ import annotations

import json
from typing import Any

import pytest
from drawing_jobs import (
    DRAW,
    assert_a_bake_changes_only_what_the_lora_does,
    assert_bench_finds_both_right,
    assert_tune_runs,
    drawn,
)
from PIL import Image
from shell import Shell

from sdflow.manifest import read_manifest

pytestmark = pytest.mark.slow
WORKFLOW = "tiny_controlnet"
FOLDER = "pipelines/tiny_controlnet"
NETS = {"controlnet_depth", "controlnet_edges"}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("controlnet_job"))
    Image.radial_gradient("L").resize((64, 64)).save(shell.folder / "edges.png")
    return shell


@pytest.fixture(scope="module")
def first(shell: Shell) -> Any:
    (pipeline,) = shell.json("run", WORKFLOW, "--no-verify")["pipelines"]
    return pipeline


def test_two_nets_share_one_graph_and_each_has_weights_of_its_own(shell: Shell, first: Any) -> None:
    steps = [step for step in first["steps"] if step["step"].split("/")[1] in NETS]
    assert [step["outcome"] for step in steps].count("built") == len(steps) - 2, "the second net's graph is the first's"
    assert {step["pass"] for step in steps if step["outcome"] == "cached"} == {
        "OnnxConversion",
        "OrtTransformersOptimization",
    }
    assert set(first["evaluation"]["submodels"]) >= NETS


def test_generate_follows_the_images_that_it_is_given(shell: Shell, first: Any) -> None:
    plain = drawn(shell, FOLDER, "plain")
    controlled = drawn(shell, FOLDER, "edges", "--control", "edges=edges.png:0.8:0:0.6")
    both = drawn(shell, FOLDER, "both", "--control", "edges=edges.png", "--control", "depth=edges.png:0.5")
    assert len({plain, controlled, both}) == 3
    assert drawn(shell, FOLDER, "again") == plain
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
    assert_a_bake_changes_only_what_the_lora_does(shell, FOLDER, "--control", "edges=edges.png")
    assert set(read_manifest(shell.folder / "baked/ink").artifacts) >= NETS


def test_bench_and_tune_run_on_it(shell: Shell, first: Any) -> None:
    assert_bench_finds_both_right(shell, FOLDER, "--steps", "2")
    assert_tune_runs(shell, FOLDER)
