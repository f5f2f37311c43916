"""Another VAE in place of a checkpoint's own: from everywhere it may come from, tensor by tensor; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layout import original_layout, vae_tensors
from safetensors.torch import save_file

from sdflow.errors import CheckpointError, UsageError
from sdflow.manifest import Origin
from sdflow.sources import (
    Checkpoint,
    CheckpointNotLocal,
    PlainDigests,
    load_module,
    load_pipeline,
    open_checkpoint,
    reopen_checkpoint,
)
from tests.sources.hub_cache import COMMIT, cached_repository

Tensors = Mapping[str, torch.Tensor]
Write = Callable[[Path, Any, Checkpoint], str]
MODEL, OTHER = "synthetic:sd15-tiny", "synthetic:sdxl-tiny?seed=1"
VAE = ("vae_encoder", "vae_decoder")


def opened(reference: str = MODEL, **options: Any) -> Checkpoint:
    return open_checkpoint(reference, digests=PlainDigests(), download=False, **options)


def with_vae(reference: str, **options: Any) -> Checkpoint:
    return opened(components={"vae": reference}, **options)


def state(checkpoint: Checkpoint, submodel: str) -> Tensors:
    tensors: Tensors = load_module(submodel, checkpoint.submodels[submodel].load).state_dict()
    return tensors


@pytest.fixture(scope="module")
def own() -> Checkpoint:
    return opened()


@pytest.fixture(scope="module")
def other() -> Checkpoint:
    return opened(OTHER)


@pytest.fixture(scope="module")
def vae(other: Checkpoint) -> Any:
    """What is looked for, as diffusers' module."""
    return load_module("vae_decoder", other.submodels["vae_decoder"].load)


def contiguous(tensors: Tensors, prefix: str = "") -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}


def in_a_folder(folder: Path, vae: Any, other: Checkpoint) -> str:
    vae.save_pretrained(folder / "mended")
    return str(folder / "mended")


def in_a_pipeline(folder: Path, vae: Any, other: Checkpoint) -> str:
    load_pipeline(other).save_pretrained(folder / "whole")
    return str(folder / "whole")


def in_a_file_by_the_original_names(folder: Path, vae: Any, other: Checkpoint) -> str:
    training = {"loss.logvar": torch.zeros(1), "model_ema.decay": torch.zeros(1)}
    save_file({**contiguous(vae_tensors(vae)), **training}, folder / "sdxl_vae.safetensors")
    return str(folder / "sdxl_vae.safetensors")


def in_a_file_with_the_prefix(folder: Path, vae: Any, other: Checkpoint) -> str:
    save_file(contiguous(vae_tensors(vae), "first_stage_model."), folder / "prefixed.safetensors")
    return str(folder / "prefixed.safetensors")


def in_a_file_by_the_names_of_diffusers(folder: Path, vae: Any, other: Checkpoint) -> str:
    save_file(contiguous(vae.state_dict()), folder / "diffusers.safetensors")
    return str(folder / "diffusers.safetensors")


def in_a_pickle(folder: Path, vae: Any, other: Checkpoint) -> str:
    torch.save({"state_dict": contiguous(vae_tensors(vae))}, folder / "old.ckpt")
    return str(folder / "old.ckpt")


def synthetic(folder: Path, vae: Any, other: Checkpoint) -> str:
    return OTHER


WITH_ITS_CONFIG = (in_a_folder, in_a_pipeline, synthetic)
FILES = (
    in_a_file_by_the_original_names,
    in_a_file_with_the_prefix,
    in_a_file_by_the_names_of_diffusers,
    in_a_pickle,
)


@pytest.mark.parametrize("write", [*WITH_ITS_CONFIG, *FILES])
def test_every_tensor_of_the_vae_is_the_other_ones_and_nothing_else_changes(
    write: Write, tmp_path: Path, own: Checkpoint, vae: Any, other: Checkpoint
) -> None:
    reference = write(tmp_path, vae, other)
    found = with_vae(reference, allow_pickle=write is in_a_pickle)
    for name in VAE:
        ours, theirs = state(found, name), vae.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert found.submodels[name].identity != own.submodels[name].identity
    rest = set(own.submodels) - set(VAE)
    assert {name: found.submodels[name] for name in rest} == {name: own.submodels[name] for name in rest}
    assert (found.family, found.companions, found.options) == (own.family, own.companions, own.options)
    factor = found.facts["scaling_factor"]
    assert factor == (other if write in WITH_ITS_CONFIG else own).facts["scaling_factor"]
    assert any("scales latents by" in note for note in found.notes) == (write in WITH_ITS_CONFIG)
    assert {**found.facts, "scaling_factor": None} == {**own.facts, "scaling_factor": None}
    assert {key: value for key, value in found.provenance.items() if key != "components"} == own.provenance
    assert json.loads(json.dumps(found.provenance)) == found.provenance
    assert f"vae: {reference} instead of the checkpoint's own." in found.notes


def test_a_vae_has_the_identity_that_it_has_at_home(tmp_path: Path, vae: Any, other: Checkpoint) -> None:
    folder = in_a_pipeline(tmp_path, vae, other)
    home, found = opened(folder), with_vae(folder)
    for name in VAE:
        assert found.submodels[name].identity == home.submodels[name].identity
        assert with_vae(OTHER).submodels[name].identity == other.submodels[name].identity
    files = found.provenance["components"]["vae"]["files"]
    assert list(files) == ["vae/diffusion_pytorch_model.safetensors"]
    assert files.items() <= home.provenance["files"].items()


def test_of_a_pipeline_nothing_but_the_vae_is_read(tmp_path: Path, vae: Any, other: Checkpoint) -> None:
    folder = Path(in_a_pipeline(tmp_path, vae, other))
    (folder / "model_index.json").unlink()
    (folder / "unet/diffusion_pytorch_model.safetensors").unlink()
    assert with_vae(str(folder)).facts["scaling_factor"] == other.facts["scaling_factor"]


def test_a_whole_checkpoint_in_one_file_gives_its_vae(tmp_path: Path) -> None:
    donor = opened("synthetic:sd15-tiny?seed=5")
    save_file(contiguous(original_layout(donor)), tmp_path / "donor.safetensors")
    found, theirs = with_vae(str(tmp_path / "donor.safetensors")), state(donor, "vae_decoder")
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in state(found, "vae_decoder").items())
    alone = opened(str(tmp_path / "donor.safetensors"))
    assert {name: found.submodels[name].identity for name in VAE} == {
        name: alone.submodels[name].identity for name in VAE
    }


def test_the_sample_is_a_source_too(own: Checkpoint) -> None:
    sample = opened("sample:shapes")
    if sample.submodels["vae_decoder"].load["config"]["latent_channels"] != own.facts["latent_channels"]:
        pytest.fail("the sample's VAE no longer fits; take another for this test")
    found = with_vae("sample:shapes")
    assert found.submodels["vae_decoder"].identity == sample.submodels["vae_decoder"].identity
    assert found.provenance["components"]["vae"].items() >= {"kind": "sample", "name": "shapes"}.items()


def edit_config(folder: str, **changes: Any) -> str:
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**config, **changes}.items() if value is not ...}))
    return folder


def test_a_level_more_changes_the_granularity(tmp_path: Path, own: Checkpoint) -> None:
    from diffusers import AutoencoderKL

    config = dict(own.submodels["vae_decoder"].load["config"])
    levels = len(config["block_out_channels"])
    config["block_out_channels"] = [*config["block_out_channels"], config["block_out_channels"][-1]]
    config["down_block_types"] = ["DownEncoderBlock2D"] * (levels + 1)
    config["up_block_types"] = ["UpDecoderBlock2D"] * (levels + 1)
    AutoencoderKL.from_config(config).save_pretrained(tmp_path)
    facts = with_vae(str(tmp_path)).facts
    assert facts["vae_scale_factor"] == 2 * own.facts["vae_scale_factor"]
    assert facts["granularity"] == 2 * own.facts["granularity"]
    assert facts["image_size"] == 2 * own.facts["image_size"]


REFUSED: dict[str, tuple[Callable[[str], object], str, str]] = {
    "another class": (
        lambda folder: edit_config(folder, _class_name="VQModel"),
        "a configuration of VQModel, not of AutoencoderKL",
        "Stable Diffusion 1.x",
    ),
    "other latents": (
        lambda folder: edit_config(folder, latent_channels=16),
        r"latent_sample of its vae_encoder is \(batch, 16, .*, but that of synthetic:sd15-tiny is \(batch, 4,",
        "Name a vae for Stable Diffusion 1.x",
    ),
    "no latents": (
        lambda folder: edit_config(folder, latent_channels=...),
        "its configuration is incomplete: 'latent_channels'",
        "Save it again",
    ),
    "moved latents": (
        lambda folder: edit_config(folder, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        "the vae shifts its latents by latents_mean",
        "only a scaling_factor",
    ),
    "no weights": (
        lambda folder: (Path(folder) / "diffusion_pytorch_model.safetensors").unlink(),
        r"no weights: diffusion_pytorch_model\.safetensors",
        "",
    ),
    "no config": (
        lambda folder: (Path(folder) / "config.json").unlink(),
        r"holds neither vae/config\.json nor config\.json",
        "save_pretrained",
    ),
    "damaged weights": (
        lambda folder: (Path(folder) / "diffusion_pytorch_model.safetensors").write_bytes(b"no"),
        "not a valid safetensors file",
        "Download",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_does_not_fit_is_refused(case: str, tmp_path: Path, vae: Any, other: Checkpoint) -> None:
    spoil, says, remedy = REFUSED[case]
    folder = in_a_folder(tmp_path, vae, other)
    spoil(folder)
    with pytest.raises(CheckpointError, match=says) as raised:
        with_vae(folder)
    assert raised.value.where
    assert remedy in (raised.value.remedy or "")


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, vae: Any) -> None:
    tensors = contiguous(vae_tensors(vae))
    path = tmp_path / "other.safetensors"
    save_file({"lora_unet_x.lora_up.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(
        CheckpointError, match=r"tensor encoder\.conv_in\.weight is missing: this is not a vae\n  Name a file"
    ):
        with_vae(str(path))
    wide = torch.zeros(tensors["decoder.conv_in.weight"].shape[0], 16, 3, 3)
    save_file({**tensors, "decoder.conv_in.weight": wide}, path)
    with pytest.raises(
        CheckpointError, match=r"decoder\.conv_in\.weight is \[\d+, 16, 3, 3\], but that of synthetic:sd15"
    ):
        with_vae(str(path))
    save_file({name: tensor for name, tensor in tensors.items() if name != "decoder.mid.attn_1.q.bias"}, path)
    with pytest.raises(CheckpointError, match=r"missing: decoder\.mid_block\.attentions\.0\.to_q\.bias"):
        with_vae(str(path))


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("DIR/old.ckpt", "pickled weights can run any code"),
        ("DIR/gone", "no such file or folder"),
        ("DIR/notes.txt", r"the file type '\.txt' is unknown"),
        ("ftp:x", "not a reference"),
        ("synthetic:sd16", "unknown architecture 'sd16'"),
    ],
)
def test_what_is_not_there_or_not_allowed_is_told(
    reference: str, says: str, tmp_path: Path, vae: Any, other: Checkpoint
) -> None:
    in_a_pickle(tmp_path, vae, other)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=says) as raised:
        with_vae(reference.replace("DIR", str(tmp_path)))
    assert raised.value.where and raised.value.remedy


def test_only_networks_are_exchanged() -> None:
    says = r"no component 'scheduler' that can be replaced\n  Known: vae, unet, text_encoder"
    with pytest.raises(CheckpointError, match=says):
        opened(components={"scheduler": OTHER})


def test_a_text_encoder_is_exchanged_where_its_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    found, own = opened(components={"text_encoder": f"{MODEL}?seed=8"}), opened()
    assert found.submodels["text_encoder"] == opened(f"{MODEL}?seed=8").submodels["text_encoder"]
    assert found.companions == own.companions and found.submodels["unet"] == own.submodels["unet"]
    text = load_module("text_encoder", own.submodels["text_encoder"].load)
    text.save_pretrained(tmp_path / "text")
    config = tmp_path / "text/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 77}))
    with pytest.raises(CheckpointError, match=r"its vocabulary has 77 entries, but that of .* has \d+"):
        opened(components={"text_encoder": str(tmp_path / "text")})


# From the manifest again


def in_the_hub_cache(home: Path, vae: Any) -> Path:
    """owner/vae in a local cache of the hub, whose branch `main` is at COMMIT."""
    repository = cached_repository(home, "owner/vae")
    vae.save_pretrained(repository / "snapshots" / COMMIT)
    return repository


def test_a_pipeline_is_opened_again_at_the_commits_that_were_used(
    tmp_path: Path, vae: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointNotLocal):
        with_vae("hf:owner/vae")
    repository = in_the_hub_cache(tmp_path, vae)
    built = with_vae("hf:owner/vae")
    assert {built.submodels[name].identity["commit"] for name in VAE} == {COMMIT}
    origin = Origin("x", "cpu", MODEL, built.provenance, components={"vae": "hf:owner/vae"})
    (repository / "refs/main").write_text("b" * 40)  # the branch has moved, and its commit is not on this machine
    with pytest.raises(CheckpointNotLocal):
        with_vae("hf:owner/vae")
    again = reopen_checkpoint(origin, "here", digests=PlainDigests())
    assert again.submodels == built.submodels
    assert origin.pinned_components() == {"vae": f"hf:owner/vae@{COMMIT}"}


def test_a_checkpoint_of_the_hub_is_the_same_though_its_branch_is_now_named_by_its_commit(
    tmp_path: Path, other: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = cached_repository(tmp_path, "owner/tiny")
    load_pipeline(other).save_pretrained(repository / "snapshots" / COMMIT)
    built = opened("hf:owner/tiny")
    origin = Origin("x", "cpu", "hf:owner/tiny", built.provenance)
    assert reopen_checkpoint(origin, "here", digests=PlainDigests()).submodels == built.submodels


def test_a_vae_that_has_changed_since_is_told(tmp_path: Path, vae: Any, other: Checkpoint) -> None:
    folder = in_a_folder(tmp_path, vae, other)
    built = with_vae(folder)
    origin = Origin("x", "cpu", MODEL, built.provenance, components={"vae": folder})
    assert reopen_checkpoint(origin, "here", digests=PlainDigests()).submodels == built.submodels
    save_file(contiguous({name: tensor + 1 for name, tensor in vae.state_dict().items()}),
              tmp_path / "mended/diffusion_pytorch_model.safetensors")  # fmt: skip
    says = (
        rf"here: the checkpoint {MODEL}, vae .*mended differs from the one that this pipeline was built from\n  Restore"
    )
    with pytest.raises(UsageError, match=says):
        reopen_checkpoint(origin, "here", digests=PlainDigests())
    with pytest.raises(UsageError, match="differs from the one that this pipeline was built from"):
        reopen_checkpoint(replace(origin, components={}), "here", digests=PlainDigests())
