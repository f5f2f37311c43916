"""Another denoiser in place of a checkpoint's own: from everywhere it may come from, how it draws then, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layout import unet_tensors
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.manifest import Origin
from sdflow.sources import (
    Checkpoint,
    CheckpointNotLocal,
    PlainDigests,
    few_steps,
    load_module,
    open_checkpoint,
    reopen_checkpoint,
)
from tests.sources.hub_cache import COMMIT, cached_repository

MODELS = {"synthetic:sd15-tiny": "synthetic:lcm-tiny?seed=1", "synthetic:sdxl-tiny": "synthetic:lcm-sdxl-tiny?seed=1"}
"""A model, and one whose denoiser takes the guidance as an input, as that of latent-consistency/lcm-sdxl does."""
XL = "synthetic:sdxl-tiny"


def opened(reference: str, **options: Any) -> Checkpoint:
    return open_checkpoint(reference, digests=PlainDigests(), download=False, **options)


def with_unet(reference: str, model: str = XL, **options: Any) -> Checkpoint:
    return opened(model, components={"unet": reference}, **options)


def module(checkpoint: Checkpoint) -> Any:
    return load_module("unet", checkpoint.submodels["unet"].load)


@pytest.fixture(scope="module")
def unets() -> Mapping[str, Any]:
    """Of each model that is put in place of another's, as diffusers' module."""
    return {reference: module(opened(reference)) for reference in (*MODELS.values(), f"{XL}?seed=1")}


def in_a_folder(folder: Path, unet: Any) -> str:
    unet.save_pretrained(folder / "lcm-sdxl")
    return str(folder / "lcm-sdxl")


def in_a_pipeline(folder: Path, unet: Any) -> str:
    unet.save_pretrained(folder / "whole/unet")
    return str(folder / "whole")


def by_the_original_names(folder: Path, unet: Any) -> str:
    save_file({name: each.contiguous() for name, each in unet_tensors(unet).items()}, folder / "unet.safetensors")
    return str(folder / "unet.safetensors")


def with_the_prefix(folder: Path, unet: Any) -> str:
    named = {f"model.diffusion_model.{name}": each.contiguous() for name, each in unet_tensors(unet).items()}
    save_file(named, folder / "checkpoint.safetensors")
    return str(folder / "checkpoint.safetensors")


def by_the_names_of_diffusers(folder: Path, unet: Any) -> str:
    save_file(unet.state_dict(), folder / "sdxl_lightning_2step_unet.safetensors")
    return str(folder / "sdxl_lightning_2step_unet.safetensors")


Write = Callable[[Path, Any], str]
WRITE: tuple[Write, ...] = (in_a_folder, in_a_pipeline, by_the_names_of_diffusers)
ORIGINAL: tuple[Write, ...] = (by_the_original_names, with_the_prefix)


def assert_taken(found: Checkpoint, own: Checkpoint, unet: Any) -> None:
    ours, theirs = module(found).state_dict(), unet.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    rest = set(own.submodels) - {"unet"}
    assert {name: found.submodels[name] for name in rest} == {name: own.submodels[name] for name in rest}
    assert (found.family, found.companions, found.facts) == (own.family, own.companions, own.facts)
    assert {key: value for key, value in found.provenance.items() if key != "components"} == own.provenance


@pytest.mark.parametrize("write", WRITE)
@pytest.mark.parametrize("model", MODELS)
def test_a_latent_consistency_models_denoiser_is_taken_from_everywhere(
    write: Write, model: str, tmp_path: Path, unets: Mapping[str, Any]
) -> None:
    unet = unets[MODELS[model]]
    found = with_unet(write(tmp_path, unet), model)
    assert_taken(found, opened(model), unet)
    assert found.submodels["unet"].load["config"]["time_cond_proj_dim"] == 256


@pytest.mark.parametrize("write", [*WRITE, *ORIGINAL])
def test_a_denoiser_of_the_same_kind_is_taken_from_everywhere(
    write: Write, tmp_path: Path, unets: Mapping[str, Any]
) -> None:
    unet, own = unets[f"{XL}?seed=1"], opened(XL)
    found = with_unet(write(tmp_path, unet))
    assert_taken(found, own, unet)
    assert module(found).config.time_cond_proj_dim is None


def test_it_has_the_identity_that_it_has_at_home() -> None:
    other = "synthetic:lcm-sdxl-tiny?seed=1"
    assert with_unet(other).submodels["unet"].identity == opened(other).submodels["unet"].identity


def test_how_it_draws_follows_the_denoiser_that_was_put_in(tmp_path: Path, unets: Mapping[str, Any]) -> None:
    lcm, plain = unets["synthetic:lcm-sdxl-tiny?seed=1"], unets[f"{XL}?seed=1"]
    said = few_steps(with_unet(in_a_folder(tmp_path, lcm)), [])
    because = "lcm-sdxl is a latent consistency model"
    assert said == {"steps": 4, "guidance_scale": 8.0, "scheduler": "lcm", "because": because}
    said = few_steps(with_unet(by_the_names_of_diffusers(tmp_path, plain)), [])
    assert (said["steps"], said["scheduler"]) == (2, "euler_trailing")
    assert said["because"] == "sdxl_lightning_2step_unet.safetensors is SDXL-Lightning"
    turbo = few_steps(with_unet("synthetic:sdxl-turbo-tiny"), [])
    assert (turbo["steps"], turbo["scheduler"]) == (1, "euler_a_trailing"), "it brings no scheduler"
    assert few_steps(with_unet(f"{XL}?seed=1"), []) == {}
    assert few_steps(with_unet(f"{XL}?seed=1", "synthetic:sdxl-turbo-tiny"), []) == {}, (
        "what made it quick is not there"
    )


def test_from_the_hub_it_is_opened_again_at_the_commit_that_was_used(
    tmp_path: Path, unets: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As latent-consistency/lcm-sdxl is there: config.json and weights at the top, in two precisions."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    reference, unet = "hf:latent-consistency/lcm-sdxl", unets["synthetic:lcm-sdxl-tiny?seed=1"]
    with pytest.raises(CheckpointNotLocal):
        with_unet(reference)
    repository = cached_repository(tmp_path, "latent-consistency/lcm-sdxl")
    unet.save_pretrained(repository / "snapshots" / COMMIT)
    unet.save_pretrained(repository / "snapshots" / COMMIT, variant="fp16")
    built = with_unet(reference)
    assert_taken(built, opened(XL), unet)
    assert built.submodels["unet"].identity["commit"] == COMMIT
    assert few_steps(built, [])["because"] == "lcm-sdxl is a latent consistency model"
    files = built.provenance["components"]["unet"]["files"]
    assert list(files) == ["diffusion_pytorch_model.safetensors"]
    (repository / "refs/main").write_text("b" * 40)
    origin = Origin("x", "cpu", XL, built.provenance, components={"unet": reference})
    assert origin.pinned_components() == {"unet": f"{reference}@{COMMIT}"}
    assert reopen_checkpoint(origin, "here", digests=PlainDigests()).submodels == built.submodels


@pytest.mark.parametrize(
    ("model", "reference", "says"),
    [
        ("synthetic:sd15", "synthetic:sd21", r"encoder_hidden_states of its unet is \(batch, sequence, 1024\)"),
        ("synthetic:sd15-tiny", XL, "of its unet is"),
        (XL, "synthetic:sdxl-inpainting-tiny", r"sample of its unet is \(batch, 9,"),
        ("synthetic:sdxl", "synthetic:sdxl-refiner", "this is the SDXL refiner's UNet"),
        ("synthetic:lcm-tiny", "synthetic:sd15-tiny", "timestep_cond of its unet is missing"),
        (XL, "synthetic:taesd-tiny", "is not a unet"),
    ],
)
def test_one_that_does_not_fit_is_refused(model: str, reference: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as raised:
        with_unet(reference, model)
    assert raised.value.where == reference and raised.value.remedy


def test_a_file_of_another_generation_is_refused(tmp_path: Path, unets: Mapping[str, Any]) -> None:
    path = by_the_names_of_diffusers(tmp_path, unets["synthetic:lcm-tiny?seed=1"])
    with pytest.raises(CheckpointError, match="attn2.to_k.weight"):
        with_unet(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="this is not a unet"):
        with_unet(path)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_guidance_that_is_no_matrix_is_refused(
    shape: tuple[int, ...], tmp_path: Path, unets: Mapping[str, Any]
) -> None:
    tensors = {**unets[f"{XL}?seed=1"].state_dict(), "time_embedding.cond_proj.weight": torch.zeros(shape)}
    save_file(tensors, tmp_path / "unet.safetensors")
    with pytest.raises(CheckpointError, match="cond_proj"):
        module(with_unet(str(tmp_path / "unet.safetensors")))
