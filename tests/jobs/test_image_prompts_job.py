"""The commands on a pipeline with an IP-Adapter, from the shell, from one build."""

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
from ip_adapter_files import save_adapter, save_encoder, tensors
from PIL import Image
from shell import Shell

from sdflow.manifest import read_manifest

pytestmark = pytest.mark.slow
WORKFLOW = "tiny_ip_adapter"
FOLDER, READS = "pipelines/tiny_ip_adapter", "image_encoder"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("ip_adapter_job"))
    for name, mode in (("one", "L"), ("other", "RGB")):
        Image.radial_gradient("L").resize((72, 96)).convert(mode).rotate(len(name) * 20).save(
            shell.folder / f"{name}.png"
        )
    return shell


@pytest.fixture(scope="module")
def first(shell: Shell) -> Any:
    (pipeline,) = shell.json("run", WORKFLOW, "--no-verify")["pipelines"]
    return pipeline


def test_generate_follows_the_image_that_it_is_shown(shell: Shell, first: Any) -> None:
    plain = drawn(shell, FOLDER, "plain")
    shown = drawn(shell, FOLDER, "shown", "--ip-image", "one.png:0.8")
    both = drawn(shell, FOLDER, "both", "--ip-image", "one.png", "--ip-image", "other.png:0.8")
    assert len({plain, shown, both}) == 3
    assert drawn(shell, FOLDER, "none", "--ip-image", "one.png:0") == plain
    with Image.open(shell.folder / "shown/001-1.png") as image:
        (told,) = json.loads(image.info["sdflow"])["image_prompts"]
    assert (told["name"], told["scale"]) == ("one.png", 0.8)
    assert READS in first["evaluation"]["submodels"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--ip-image", "one.png:0.5", "--ip-image", "other.png:0.6"), "share one scale"),
        (("--ip-image", "nowhere.png"), "nowhere.png"),
        (("--ip-image", "one.png:1e999"), "inf is not a valid scale"),
    ],
)
def test_what_means_nothing_is_told_in_a_line(shell: Shell, first: Any, given: tuple[str, ...], told: str) -> None:
    done = shell.run("generate", FOLDER, *DRAW, *given)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_it_is_verified_with_the_image_that_it_changes(shell: Shell, first: Any) -> None:
    (verified,) = shell.json("verify", FOLDER, "--quick", "--fresh")["pipelines"]
    assert verified["passed"] and verified["image"]["psnr"] > 60
    assert [output["name"] for output in verified["submodels"][READS]["outputs"]] == ["ip_hidden_states_0"]


def test_another_adapter_of_the_same_shape_builds_no_graph_of_the_denoiser_again(shell: Shell, first: Any) -> None:
    save_encoder(shell.folder / "image_encoder")
    save_adapter(shell.folder / "own.safetensors", tensors("sd15-tiny"))
    own = shell.folder / "own.yaml"
    own.write_text(
        f"extends: base/{WORKFLOW}.yaml\nname: own\nip_adapters: [{{file: own.safetensors}}]\n", encoding="utf-8"
    )
    (pipeline,) = shell.json("run", str(own), "--no-verify", "--no-evaluate")["pipelines"]
    built = {step["pass"] for step in pipeline["steps"] if step["outcome"] == "built" and "/unet/" in step["step"]}
    assert built == {"BindWeights"}
    shown = ("--ip-image", "one.png")
    assert drawn(shell, "pipelines/own", "own", *shown) != drawn(shell, FOLDER, "random", *shown)
    assert read_manifest(shell.folder / "pipelines/own").origin.ip_adapters == (
        {"file": str(shell.folder / "own.safetensors")},
    )


def test_bake_keeps_the_adapter_and_builds_only_what_the_lora_changes(shell: Shell, first: Any) -> None:
    assert_a_bake_changes_only_what_the_lora_does(shell, FOLDER, "--ip-image", "one.png")


def test_bench_and_tune_run_on_it(shell: Shell, first: Any) -> None:
    assert_bench_finds_both_right(shell, FOLDER, "--steps", "2")
    assert_tune_runs(shell, FOLDER)
