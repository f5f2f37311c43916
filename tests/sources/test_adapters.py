"""IP-Adapters beside a checkpoint: from everywhere they may come from, tensor by tensor; and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from ip_adapter_files import save_adapter, save_encoder, tensors
from safetensors.torch import save_file
from transformers import CLIPVisionModelWithProjection

from sdflow.errors import CheckpointError, UsageError
from sdflow.manifest import Origin
from sdflow.sources import (
    Checkpoint,
    CheckpointNotLocal,
    PlainDigests,
    load_module,
    open_checkpoint,
    reopen_checkpoint,
)
from sdflow.sources.architectures import architecture_config
from sdflow.sources.load import parameter_shapes
from sdflow.sources.reference import AdapterReference
from sdflow.weights.tensors import open_tensors
from tests.sources.hub_cache import COMMIT, cached_repository

MODEL, XL = "synthetic:sd15-tiny", "synthetic:sdxl-tiny"
READS, DENOISES = "image_encoder", "unet"
Parts = dict[str, dict[str, torch.Tensor]]


def opened(*adapters: AdapterReference, model: str = MODEL, allow_pickle: bool = True) -> Checkpoint:
    return open_checkpoint(model, digests=PlainDigests(), download=False, allow_pickle=allow_pickle, adapters=adapters)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As h94/IP-Adapter lies on the hub: the encoder beside the adapters' files."""
    folder = tmp_path_factory.mktemp("ip_adapter") / "models"
    save_encoder(folder / "image_encoder")
    save_adapter(folder / "plain.safetensors", tensors("sd15-tiny"))
    save_adapter(folder / "plain.bin", tensors("sd15-tiny"))
    save_adapter(folder / "plus.safetensors", tensors("sd15-tiny", plus=True))
    save_adapter(folder / "plus.bin", tensors("sd15-tiny", plus=True))
    return folder


def diffusers_unet(parts: Parts) -> Any:
    """What diffusers makes of the adapter's tensors."""
    unet = UNet2DConditionModel.from_config(architecture_config("sd15-tiny", "unet"))
    unet._load_ip_adapter_weights([parts], low_cpu_mem_usage=False)
    return unet


@pytest.mark.parametrize("name", ["plain.safetensors", "plain.bin", "plus.safetensors", "plus.bin"])
def test_every_tensor_is_where_diffusers_puts_it(folder: Path, name: str) -> None:
    found = opened(AdapterReference(str(folder / name)))
    wanted = diffusers_unet(tensors("sd15-tiny", plus="plus" in name))
    unet = load_module(DENOISES, found.submodels[DENOISES].load).state_dict()
    matrices = {key: value for key, value in wanted.state_dict().items() if "_ip." in key}
    assert len(matrices) == 32
    assert {key for key in unet if "_ip." in key} == set(matrices)
    assert all(torch.equal(unet[key], value) for key, value in matrices.items())
    encoder = load_module(READS, found.submodels[READS].load).state_dict()
    projection = wanted.encoder_hid_proj.image_projection_layers[0].state_dict()
    assert {key for key in encoder if key.startswith("image_proj.")} == {f"image_proj.0.{key}" for key in projection}
    assert all(torch.equal(encoder[f"image_proj.0.{key}"], value) for key, value in projection.items())
    clip = CLIPVisionModelWithProjection.from_pretrained(folder / "image_encoder").state_dict()
    assert all(torch.equal(encoder[key], value) for key, value in clip.items())


@pytest.mark.parametrize("name", ["plus.safetensors", "plus.bin"])
@pytest.mark.parametrize("submodel", [READS, DENOISES])
def test_single_tensors_are_those_of_the_module(folder: Path, name: str, submodel: str) -> None:
    found = opened(AdapterReference(str(folder / name)), AdapterReference("synthetic:ip-adapter-tiny?seed=4"))
    load = found.submodels[submodel].load
    whole = load_module(submodel, load).state_dict()
    with open_tensors(submodel, load, parameter_shapes(submodel, load)) as single:
        assert all(torch.equal(torch.from_numpy(single.read(key).copy()), value) for key, value in whole.items())


def test_where_the_encoder_lies_is_as_in_diffusers(folder: Path, tmp_path: Path) -> None:
    """Beside the file; in a folder of the whole repository; somewhere else."""
    beside = opened(AdapterReference(str(folder / "plain.safetensors")))
    named = AdapterReference(str(folder.parent), "models/plain.safetensors")
    assert opened(named).submodels[READS].identity == beside.submodels[READS].identity
    save_adapter(tmp_path / "other" / "plain.safetensors", tensors("sd15-tiny"))
    (tmp_path / "models").symlink_to(folder)
    inside = AdapterReference(str(tmp_path), "other/plain.safetensors", encoder_folder="models/image_encoder")
    assert opened(inside).submodels[READS].identity == beside.submodels[READS].identity
    elsewhere = AdapterReference(str(tmp_path / "other/plain.safetensors"), encoder=str(folder / "image_encoder"))
    assert opened(elsewhere).submodels[READS].identity == beside.submodels[READS].identity


def test_adapters_change_the_denoiser_and_nothing_else_of_the_checkpoint(folder: Path) -> None:
    plain, adapted = opened(), opened(AdapterReference(str(folder / "plus.safetensors")))
    assert set(adapted.submodels) - set(plain.submodels) == {READS}
    changed = {name for name in plain.submodels if plain.submodels[name].identity != adapted.submodels[name].identity}
    assert changed == {DENOISES}
    config = adapted.submodels[DENOISES].load["config"]
    assert config.keys() - plain.submodels[DENOISES].load["config"].keys() == {"ip_adapter_tokens"}
    assert config["ip_adapter_tokens"] == [6]
    assert {stamp["path"] for stamp in adapted.stamps([DENOISES])} == {str(folder / "plus.safetensors")}


def test_another_adapter_of_the_same_shape_has_the_same_graphs_and_other_keys(folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "other.safetensors", tensors("sd15-tiny", seed=9))
    encoder = str(folder / "image_encoder")
    one = opened(AdapterReference(str(folder / "plain.safetensors")))
    other = opened(AdapterReference(str(tmp_path / "other.safetensors"), encoder=encoder))
    for name in (READS, DENOISES):
        assert one.submodels[name].load["config"] == other.submodels[name].load["config"]
        assert one.submodels[name].identity != other.submodels[name].identity


def a_lora(parts: Parts) -> Parts:
    parts["ip_adapter"]["0.to_q_lora.down.weight"] = torch.zeros(4, 4)
    return parts


def of_a_face(parts: Parts) -> Parts:
    parts["image_proj"] = {"proj.0.weight": torch.zeros(4, 4), "norm.weight": torch.zeros(4)}
    return parts


def of_a_face_plus(parts: Parts) -> Parts:
    parts["image_proj"] = {"perceiver_resampler.proj_in.weight": torch.zeros(4, 4), "norm.weight": torch.zeros(4)}
    return parts


def full_face(parts: Parts) -> Parts:
    parts["image_proj"] = {"proj.0.weight": torch.zeros(4, 4), "proj.3.weight": torch.zeros(4)}
    return parts


def without_projection(parts: Parts) -> Parts:
    return {"ip_adapter": parts["ip_adapter"]}


def something_else(parts: Parts) -> Parts:
    return {"image_proj": {"what.weight": torch.zeros(4)}, "ip_adapter": parts["ip_adapter"]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (a_lora, "FaceID"),
        (of_a_face, "FaceID, which"),
        (of_a_face_plus, "FaceID Plus"),
        (full_face, "full-face"),
        (without_projection, "image_proj"),
        (something_else, "not a known IP-Adapter"),
        (lambda parts: tensors("sdxl-tiny"), "tokens"),
    ],
)
def test_what_is_no_adapter_for_this_checkpoint_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Parts], Parts], told: str
) -> None:
    file = save_adapter(tmp_path / "x.safetensors", change(tensors("sd15-tiny")))
    with pytest.raises(CheckpointError, match=told):
        opened(AdapterReference(str(file), encoder=str(folder / "image_encoder")))


def test_an_adapter_that_lacks_matrices_is_refused_when_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    parts = tensors("sd15-tiny")
    parts["ip_adapter"].pop("5.to_v_ip.weight")
    file = save_adapter(tmp_path / "x.safetensors", parts)
    found = opened(AdapterReference(str(file), encoder=str(folder / "image_encoder")))
    with pytest.raises(CheckpointError, match="missing: "):
        load_module(DENOISES, found.submodels[DENOISES].load)


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (AdapterReference("nowhere.safetensors", encoder="synthetic:ip-adapter-tiny"), "no such file"),
        (AdapterReference("synthetic:ip-adapter-tiny", encoder="synthetic:sd15-tiny"), "is not an IP-Adapter"),
        (AdapterReference("synthetic:ip-adapter"), "reads 224 pixels"),
    ],
)
def test_what_is_not_there_is_told(adapter: AdapterReference, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        opened(adapter)


def test_pickles_are_refused_unless_they_are_allowed(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="pickled weights"):
        opened(AdapterReference(str(folder / "plain.bin")), allow_pickle=False)


def test_an_encoder_that_the_adapter_does_not_read_is_refused(folder: Path, tmp_path: Path) -> None:
    parts = tensors("sd15-tiny")
    parts["image_proj"]["proj.weight"] = torch.zeros(len(parts["image_proj"]["proj.weight"]), 30)
    file = save_adapter(tmp_path / "x.safetensors", parts)
    with pytest.raises(CheckpointError, match="30 wide, but the image encoder is 40 wide and projects to 24"):
        opened(AdapterReference(str(file), encoder=str(folder / "image_encoder")))


def test_a_synthetic_adapter_is_of_every_kind_and_fits_every_family() -> None:
    for model in (MODEL, XL):
        for name in ("ip-adapter-tiny", "ip-adapter-plus-tiny"):
            found = opened(AdapterReference(f"synthetic:{name}"), model=model)
            shapes = parameter_shapes(READS, found.submodels[READS].load)
            assert any(key.startswith("image_proj.0.") for key in shapes)
    with pytest.raises(CheckpointError, match="supports no IP-Adapters"):
        opened(AdapterReference("synthetic:ip-adapter-tiny"), model="synthetic:lcm-tiny")


def test_one_file_alone_is_no_encoder(folder: Path, tmp_path: Path) -> None:
    save_file({"vision_model.x": torch.zeros(1)}, tmp_path / "encoder.safetensors")
    with pytest.raises(CheckpointError, match="a folder with its configuration"):
        opened(AdapterReference(str(folder / "plain.safetensors"), encoder=str(tmp_path / "encoder.safetensors")))


def in_the_hub_cache(home: Path, folder: Path) -> Path:
    """owner/adapters in a local cache of the hub, laid out as h94/IP-Adapter, whose branch `main` is at COMMIT."""
    repository = cached_repository(home, "owner/adapters")
    shutil.copytree(folder, repository / "snapshots" / COMMIT / "models")
    (repository / "snapshots" / COMMIT / "sdxl_models").mkdir()
    file = repository / "snapshots" / COMMIT / "sdxl_models/plain.safetensors"
    save_adapter(file, tensors("sdxl-tiny"))
    return repository


def test_adapters_of_the_hub_are_opened_again_at_the_commit_that_was_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    adapter = AdapterReference("hf:owner/adapters", "models/plain.safetensors")
    with pytest.raises(CheckpointNotLocal):
        opened(adapter)
    repository = in_the_hub_cache(tmp_path, folder)
    built = opened(adapter)
    local = opened(AdapterReference(str(folder / "plain.safetensors")))
    assert built.submodels[DENOISES].identity == local.submodels[DENOISES].identity
    xl = AdapterReference("hf:owner/adapters", "sdxl_models/plain.safetensors", encoder_folder="models/image_encoder")
    assert opened(xl, model=XL).submodels[READS].identity["commit"] == COMMIT
    origin = Origin("x", "cpu", MODEL, built.provenance, ip_adapters=(adapter.to_json(),))
    (repository / "refs/main").write_text("b" * 40)  # the branch has moved, and its commit is not on this machine
    with pytest.raises(CheckpointNotLocal):
        opened(adapter)
    again = reopen_checkpoint(origin, "here", digests=PlainDigests())
    assert again.submodels == built.submodels
    assert origin.pinned_adapters() == [
        {"file": f"hf:owner/adapters@{COMMIT}", "weight_name": "models/plain.safetensors"}
    ]


def test_an_adapter_that_has_changed_since_is_told(folder: Path, tmp_path: Path) -> None:
    file = save_adapter(tmp_path / "x.safetensors", tensors("sd15-tiny"))
    adapter = AdapterReference(str(file), encoder=str(folder / "image_encoder"))
    built = opened(adapter)
    origin = Origin("x", "cpu", MODEL, built.provenance, ip_adapters=(adapter.to_json(),))
    assert reopen_checkpoint(origin, "here", digests=PlainDigests()).submodels == built.submodels
    save_adapter(file, tensors("sd15-tiny", seed=8))
    with pytest.raises(UsageError, match="differs from the one"):
        reopen_checkpoint(origin, "here", digests=PlainDigests())
