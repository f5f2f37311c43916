"""A workflow with another VAE and another denoiser: which steps keep their keys, and what becomes of the folder: verified, baked,
measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jobs.test_main_job import TINY, Shell
from kept_builds import KeptBuilds
from original_layout import vae_tensors
from safetensors.torch import save_file
from small_lora import write_lora
from started_python import StartedPython

from sdflow.bench.checkpoint import torch_modules
from sdflow.build.plan import make_plan
from sdflow.config import load_workflow
from sdflow.errors import UsageError
from sdflow.passes import registry
from sdflow.sources import PlainDigests, load_module, load_pipeline, open_checkpoint
from sdflow.store import Cache

VAE = ("vae_encoder", "vae_decoder")
LCM = "synthetic:lcm-tiny?seed=1"
OTHER = "synthetic:sdxl-tiny?seed=1"


def module() -> Any:
    checkpoint = open_checkpoint(OTHER, digests=PlainDigests(), download=False)
    return load_module("vae_decoder", checkpoint.submodels["vae_decoder"].load)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The VAE in one file, by the original names without a prefix."""
    path = tmp_path_factory.mktemp("vae") / "vae.safetensors"
    save_file({name: each.contiguous() for name, each in vae_tensors(module()).items()}, path)
    return path


def keys(cache: Cache, *overrides: str) -> dict[str, str]:
    """Every step's name -> its key, as if the steps before had given the same everywhere."""
    workflow = load_workflow(TINY, catalog=registry.catalog(), overrides=overrides)
    (plan,) = make_plan(workflow, cache).pipelines
    return {
        f"{chain.submodel}/{step.name}": step.action("0" * 64 if step.index else None, cache.salt).digest
        for chain in plan.chains
        for step in chain.steps
    }


def test_only_the_steps_of_the_vae_have_other_keys(tmp_path: Path, file: Path) -> None:
    cache = Cache(tmp_path / "cache")
    plain, other, by_file = (
        keys(cache, *chosen) for chosen in ([], [f"components.vae={OTHER}"], [f"components.vae={file}"])
    )
    assert plain.keys() == other.keys() == by_file.keys()
    bound = {f"{name}/BindWeights" for name in VAE}
    assert {name for name in plain if plain[name] != by_file[name]} == bound, "the architecture is the same"
    first = {f"{name}/OnnxConversion" for name in VAE}
    assert {name for name in plain if plain[name] != other[name]} == bound | first, "its configuration is another"


def test_the_plan_says_where_the_vae_comes_from(tmp_path: Path) -> None:
    workflow = load_workflow(TINY, catalog=registry.catalog(), overrides=[f"components.vae={OTHER}"])
    (plan,) = make_plan(workflow, Cache(tmp_path / "cache")).pipelines
    assert f"vae: {OTHER} instead of the checkpoint's own." in plan.notes
    assert any("scales latents by 0.13025" in note and "own by 0.18215" in note for note in plan.notes)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, started_python: StartedPython | None, file: Path) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("components"), started_python)
    (shell.folder / "vae.safetensors").write_bytes(file.read_bytes())
    load_pipeline(open_checkpoint(LCM, digests=PlainDigests(), download=False)).unet.save_pretrained(
        shell.folder / "lcm"
    )
    content = {"extends": str(TINY), "name": "mine", "components": {"vae": "vae.safetensors", "unet": "lcm"}}
    (shell.folder / "mine.yaml").write_text(yaml.safe_dump(content))
    return shell


@pytest.fixture(scope="module")
def built(shell: Shell, cache_of: KeptBuilds) -> Path:
    """The folder; the first test verifies it. Structures of the submodels that are Stable Diffusion 1's are there."""
    cache_of("tiny_cpu", shell.folder)
    shell.json("run", "mine.yaml", "--no-evaluate", "--no-verify")
    return shell.folder / "pipelines/mine"


def test_the_folder_is_verified_from_its_manifest(shell: Shell, built: Path) -> None:
    manifest = json.loads((built / "sdflow.json").read_text())
    assert manifest["components"] == {"vae": str(shell.folder / "vae.safetensors"), "unet": str(shell.folder / "lcm")}
    assert manifest["checkpoint"]["components"]["vae"]["kind"] == "single_file"
    assert manifest["checkpoint"]["components"]["unet"]["kind"] == "folder"
    assert manifest["few_steps"]["because"] == "lcm is a latent consistency model"
    done = shell.run("verify", str(built), "--quick")
    assert done.returncode == 0, done.stderr + done.stdout


def test_the_folder_is_measured_beside_its_own_vae_and_denoiser(built: Path) -> None:
    unet = load_pipeline(open_checkpoint(LCM, digests=PlainDigests(), download=False)).unet
    measured = torch_modules(built)
    for ours, theirs in ((measured["vae"], module()), (measured["unet"], unet)):
        ours, theirs = ours.state_dict(), theirs.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_baked_pipeline_keeps_the_vae(shell: Shell, built: Path) -> None:
    lora = write_lora(shell.folder / "ink.safetensors")
    done = shell.json("bake", "--base", str(built), "--lora", f"{lora}:0.8", "--out", "baked/ink")
    assert {each["outcome"] for each in done["pipeline"]["steps"]} == {"built", "cached"}
    before, after = (json.loads((at / "sdflow.json").read_text()) for at in (built, shell.folder / "baked/ink"))
    assert after["components"] == before["components"]
    assert after["checkpoint"] == before["checkpoint"]
    artifacts = [{name: each["submodels"][name]["artifact"] for name in VAE} for each in (before, after)]
    assert artifacts[0] == artifacts[1]
    assert after["submodels"]["unet"]["artifact"] != before["submodels"]["unet"]["artifact"]


def test_a_vae_that_has_changed_is_told_by_all_three(shell: Shell, built: Path) -> None:
    path = shell.folder / "vae.safetensors"
    kept = path.read_bytes()
    path.write_bytes(kept[:-4] + b"\0\0\0\0")
    try:
        for command in (
            ["verify", str(built)],
            ["bake", "--base", str(built), "--lora", "ink.safetensors", "--out", "b"],
        ):
            done = shell.run(*command)
            assert done.returncode == 2, done.stderr
            assert "differs from the one that this pipeline was built from" in done.stderr
            assert "Traceback" not in done.stderr
        with pytest.raises(UsageError, match="differs from the one that this pipeline was built from"):
            torch_modules(built)
    finally:
        path.write_bytes(kept)
