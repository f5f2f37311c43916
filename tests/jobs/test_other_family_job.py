"""A family that is defined in tests alone goes through every command, without a line of the package changed for it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from PIL import Image
from serve.conftest import running_server
from shell import Shell
from tiny_flux_checkpoint import OTHER_FAMILIES, tiny_flux
from until import PATIENCE

from sdflow.families import FAMILIES

SIZE = ("--height", "64", "--width", "48", "--steps", "2", "--seed", "1", "--threads", "1")
LAYERS = ("to_q", "add_k_proj", "proj_mlp", "norm1.linear")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: Any) -> Shell:
    """With the family on the import path, as all processes that its commands start."""
    tests = Path(__file__).parents[1]
    return Shell(tmp_path_factory.mktemp("other_family"), started_python, (OTHER_FAMILIES, tests / "support"))


@pytest.fixture(scope="module")
def checkpoint(shell: Shell) -> Any:
    """As diffusers saves it, in `flux`, but for its class: that of FLUX.1 is sdflow's own."""
    pipeline = tiny_flux()
    pipeline.save_pretrained(shell.folder / "flux")
    index = shell.folder / "flux/model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": "TinyFluxPipeline"}))
    return pipeline


@pytest.fixture(scope="module")
def built(shell: Shell, checkpoint: Any) -> str:
    """By the workflow that `init` writes, and verified."""
    done = shell.run("init", "--model", "flux", "--out", "flux.yaml")
    assert done.returncode == 0, done.stderr
    (pipeline,) = shell.json("run", "flux.yaml", "--no-evaluate")["pipelines"]
    assert pipeline["verification"]["passed"]
    return "pipelines/flux"


def pixels(shell: Shell, folder: str, out: str, *more: str) -> np.ndarray:
    shell.json("generate", folder, "--prompt", "an otter", *SIZE, *more, "--out", out)
    with Image.open(shell.folder / out / "001-1.png") as image:
        return np.asarray(image)


def test_the_package_does_not_know_it() -> None:
    assert "tiny_flux" not in FAMILIES


def test_it_is_inspected_and_planned(shell: Shell, checkpoint: Any, built: str) -> None:
    assert "flux-tiny" in shell.run("inspect", "flux").stdout
    assert "transformer" in shell.run("plan", "flux.yaml").stdout
    assert "flux-tiny" in shell.run("plan", "flux.yaml", "--set", "model=synthetic:flux-tiny").stdout


def test_its_images_and_those_of_one_file_are_those_of_diffusers(shell: Shell, built: str) -> None:
    """From text at three sizes, from an image, and into a mask; float32 on the CPU."""
    size = ("--height", "64", "--width", "96", "--schedule", "flow_euler,3")
    refused = shell.run("export", built, "--one-file", "one.onnx")
    assert refused.returncode == 2 and "--height" in refused.stderr, "its steps depend on the size"
    shell.json("export", built, "--one-file", "one.onnx", *size)
    done = shell.python("tiny_flux_images", "flux", built, "one.onnx")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6 and max(found.values()) < 1e-4, found


def test_generate_draws_from_text_from_an_image_and_into_a_mask(shell: Shell, built: str) -> None:
    plain = pixels(shell, built, "plain")
    assert plain.shape == (64, 48, 3)
    Image.new("RGB", (48, 64), (200, 30, 90)).save(shell.folder / "image.png")
    mask = Image.new("L", (48, 64), 0)
    mask.paste(255, (0, 0, 48, 32))
    mask.save(shell.folder / "mask.png")
    from_image = ("--image", "image.png", "--strength", "0.9")
    assert (pixels(shell, built, "from_image", *from_image)[32:] != (200, 30, 90)).any()
    masked = pixels(shell, built, "masked", *from_image, "--mask", "mask.png")
    assert (masked[32:] == (200, 30, 90)).all() and (masked[:32] != (200, 30, 90)).any()


@pytest.mark.parametrize("by", ["diffusers", pytest.param("PEFT", marks=pytest.mark.slow)])
def test_a_lora_is_baked_and_verified_against_diffusers(shell: Shell, built: str, by: str) -> None:
    """Over layers of both kinds of blocks, in the file that the library writes; PEFT's by default in `test_flux2_job.py`."""
    torch.manual_seed(7)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=list(LAYERS), init_lora_weights=False)
    module = tiny_flux().transformer
    if by == "PEFT":
        get_peft_model(module, config).save_pretrained(shell.folder / by)
    else:
        module.add_adapter(config)
        FluxPipeline.save_lora_weights(shell.folder / by, transformer_lora_layers=get_peft_model_state_dict(module))
    given = ("--lora", f"{by}:0.5", "--out", f"baked/{by}", "--verify")
    baked = shell.json("bake", "--base", built, *given)["pipeline"]
    assert baked["verification"]["passed"]
    assert (pixels(shell, f"baked/{by}", f"with_{by}") != pixels(shell, built, f"without_{by}")).any()


def test_bench_compares_it_with_diffusers(shell: Shell, built: str) -> None:
    settings = ("--size", "64", "--steps", "2", "--rounds", "1", "--threads", "1")
    measured = shell.json("bench", built, *settings, "-e", "ort-cpu", "-e", "torch-sdpa")
    verdicts = {each["name"]: each["cases"][0]["verdict"] for each in measured["engines"] if each["cases"]}
    assert verdicts == {"ort-cpu": "right", "torch-sdpa": "right"}


def test_a_server_draws_with_it(shell: Shell, built: str) -> None:
    with running_server(
        str(shell.folder / built), "--batch-sizes", "1", environment=shell.environment(), started=shell.started
    ) as server:
        wanted = {"prompt": "an otter", "size": "64x64", "steps": 2, "response_format": "b64_json"}
        answer = httpx.post(f"{server.url}/v1/images/generations", json=wanted, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
            assert image.size == (64, 64)
