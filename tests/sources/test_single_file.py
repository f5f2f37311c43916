"""Checkpoints in one file in the original layout, held to diffusers' own converters."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layout import original_layout
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.models.ldm_names import ldm_unet_names, ldm_vae_names
from sdflow.sources import Checkpoint, PlainDigests, load_module, load_pipeline, open_checkpoint

Tensors = dict[str, torch.Tensor]


def opened(path: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(str(path), digests=PlainDigests(), download=False, **options)


@pytest.fixture(scope="module")
def original(tiny: Checkpoint) -> Tensors:
    """The tiny checkpoint in the original layout."""
    return original_layout(tiny)


@pytest.fixture
def file(original: Tensors, tmp_path: Path) -> Path:
    save_file(original, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def assert_like(tiny: Checkpoint, checkpoint: Checkpoint) -> None:
    assert set(tiny.submodels) - set(checkpoint.submodels) == {"safety_checker"}
    for name in checkpoint.submodels:
        ours, theirs = (load_module(name, each.submodels[name].load).state_dict() for each in (checkpoint, tiny))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_single_file_equals_the_folder_tensor_by_tensor(tiny: Checkpoint, file: Path) -> None:
    checkpoint = opened(file)
    assert checkpoint.provenance["architecture"] == "sd15-tiny"
    assert_like(tiny, checkpoint)
    assert load_pipeline(checkpoint).safety_checker is None


def test_diffusers_converters_agree_on_every_name(tiny: Checkpoint, original: Tensors) -> None:
    from diffusers.loaders.single_file_utils import (
        convert_ldm_clip_checkpoint,
        convert_ldm_unet_checkpoint,
        convert_ldm_vae_checkpoint,
    )

    unet, vae, text = (tiny.submodels[name] for name in ("unet", "vae_decoder", "text_encoder"))
    for submodel, load, converted in (
        ("unet", unet.load, convert_ldm_unet_checkpoint(dict(original), unet.load["config"])),
        ("vae_decoder", vae.load, convert_ldm_vae_checkpoint(dict(original), vae.load["config"])),
    ):
        ours = load_module(submodel, load).state_dict()
        assert converted.keys() == ours.keys()
        assert all(torch.equal(converted[key], ours[key]) for key in ours)
    clip = convert_ldm_clip_checkpoint(dict(original))
    assert {name.removeprefix("text_model.") for name in clip} - {"embeddings.position_ids"} == {
        name.removeprefix("text_model.") for name in load_module("text_encoder", text.load).state_dict()
    }


def test_the_full_architecture_is_recognised_by_its_header(tmp_path: Path) -> None:
    """A sparse file of 4 GB with the shapes of Stable Diffusion 1.5; nothing but its header is read here."""
    import json

    from accelerate import init_empty_weights
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    from sdflow.sources.architectures import architecture_config
    from sdflow.sources.recognition import fitting_architectures
    from sdflow.sources.safetensors_file import read_header

    with init_empty_weights():
        unet = UNet2DConditionModel.from_config(architecture_config("sd15", "unet")).state_dict()
        vae = AutoencoderKL.from_config(architecture_config("sd15", "vae")).state_dict()
        text = CLIPTextModel(CLIPTextConfig.from_dict(architecture_config("sd15", "text_encoder"))).state_dict()
    names = ldm_unet_names(unet)
    assert names.keys() == unet.keys()
    shapes = {f"model.diffusion_model.{names[key]}": tensor.shape for key, tensor in unet.items()}
    shapes |= {f"first_stage_model.{name}": vae[key].shape for key, name in ldm_vae_names(vae).items()}
    # transformers 5 writes no `text_model.`; such files exist too.
    shapes |= {f"cond_stage_model.transformer.{key}": tensor.shape for key, tensor in text.items()}
    # What diffusers tells Stable Diffusion 1.x by.
    assert "model.diffusion_model.output_blocks.11.0.skip_connection.weight" in shapes
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + shape.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    sparse = tmp_path / "sd15.safetensors"
    with sparse.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
    assert end > 4e9
    assert fitting_architectures(sparse, {name: entry.shape for name, entry in read_header(sparse).items()}) == ["sd15"]


def identities(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: dict(submodel.identity) for name, submodel in checkpoint.submodels.items()}


@pytest.mark.parametrize(
    ("tensor", "submodels"),
    [
        ("cond_stage_model.transformer.text_model.final_layer_norm.bias", {"text_encoder"}),
        ("model.diffusion_model.out.2.bias", {"unet"}),
        ("first_stage_model.post_quant_conv.bias", {"vae_encoder", "vae_decoder"}),
        ("alphas_cumprod", set()),
    ],
)
def test_a_change_concerns_its_own_submodel_only(
    tensor: str, submodels: set[str], original: Tensors, file: Path, tmp_path: Path
) -> None:
    before = identities(opened(file))
    save_file(original | {tensor: original[tensor] + 1}, tmp_path / "other.safetensors")
    after = identities(opened(tmp_path / "other.safetensors"))
    assert {name for name in before if before[name] != after[name]} == submodels


def test_moving_touching_and_the_order_of_tensors_change_nothing(original: Tensors, file: Path, tmp_path: Path) -> None:
    before = identities(opened(file))
    moved = file.rename(tmp_path / "renamed.safetensors")
    os.utime(moved, (1, 1))
    assert identities(opened(moved)) == before
    save_file({f"model_ema.{i}": torch.zeros(1) for i in range(3)} | original, moved)
    assert identities(opened(moved)) == before


def test_opening_imports_no_torch(file: Path) -> None:
    script = (
        "import sys; from sdflow.sources import *\n"
        "open_checkpoint(sys.argv[1], digests=PlainDigests(), download=False)\n"
        "print([m for m in ('torch', 'transformers', 'diffusers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_and_a_stray_tensor_are_named(original: Tensors, tmp_path: Path) -> None:
    tensors = dict(original)
    del tensors["model.diffusion_model.middle_block.1.norm.bias"]
    tensors["model.diffusion_model.stray.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"missing: mid_block\.attentions\.0\.norm\.bias.*unexpected: model\.diffusion_model\.stray\.weight",
    ):
        load_module("unet", opened(tmp_path / "model.safetensors").submodels["unet"].load)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conditioner.embedders.1.model.text_projection": (1,)}, "Stable Diffusion XL"),
        ({"cond_stage_model.model.token_embedding.weight": (1,)}, "Stable Diffusion 2"),
        ({"lora_unet_conv_in.lora_up.weight": (1,)}, "a LoRA"),
        ({"model.diffusion_model.joint_blocks.0.x": (1,)}, "Stable Diffusion 3"),
        ({"model.diffusion_model.input_blocks.0.0.weight": (320, 8, 3, 3)}, "InstructPix2Pix"),
        ({"model.diffusion_model.input_blocks.0.0.weight": (320, 4, 5, 5)}, r"is \[320, 4, 5, 5\]"),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, tuple[int, ...]], message: str, original: Tensors, tmp_path: Path
) -> None:
    tensors = original | {name: torch.zeros(shape) for name, shape in changes.items()}
    # A file that would be the tiny architecture but for the change.
    tensors["model.diffusion_model.out.2.weight"] = torch.zeros(4, 320, 3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "model.safetensors")


def test_a_file_of_an_unknown_size_is_compared_with_its_own_kind(original: Tensors, tmp_path: Path) -> None:
    wider = {
        name: torch.zeros([2 * length if length >= 16 else length for length in each.shape])
        for name, each in original.items()
    }
    save_file(wider, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not a supported architecture: \S+ is \[.*\], in sd\S+ it is \["):
        opened(tmp_path / "model.safetensors")


def test_a_file_without_a_vae_or_of_a_component_is_refused(
    original: Tensors, tiny_folder: Path, tmp_path: Path
) -> None:
    without = {name: tensor for name, tensor in original.items() if not name.startswith("first_stage_model.")}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensors under first_stage_model\."):
        opened(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="this is the unet alone, of Stable Diffusion 1"):
        opened(tiny_folder / "unet/diffusion_pytorch_model.safetensors")


def test_an_unknown_kind_of_file_and_garbage_are_errors(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"the file type '\.onnx' is unknown"):
        opened(tmp_path / "model.onnx")
    (tmp_path / "model.safetensors").write_bytes(os.urandom(1000))
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        opened(tmp_path / "model.safetensors")
