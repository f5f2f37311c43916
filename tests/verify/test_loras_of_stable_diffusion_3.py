"""LoRAs of Stable Diffusion 3 in every spelling: sdflow's reader, the verification's reference, and diffusers or the arithmetic
on the tensors of the original layout agree on every weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from original_layout import mmdit_tensors
from safetensors.torch import save_file

from sdflow.errors import CheckpointError, VerificationError
from sdflow.sources import (
    Checkpoint,
    PlainDigests,
    load_module,
    load_pipeline,
    lora_delta,
    lora_submodels,
    open_checkpoint,
    read_lora,
    require_made_for,
)
from sdflow.verify.reference.merged_loras import merge_lora

Tensors = dict[str, torch.Tensor]
Weights = dict[str, Tensors]
RANK, ALPHA, SCALE = 3, 2.0, 0.7
FEW = r"transformer_blocks\.1\..*(to_q|to_k|to_v|add_k_proj|to_out\.0|to_add_out|net\.2|linear)|norm_out\.linear|pos_embed\.proj"
TEXT = r".*layers\.1\..*(q_proj|out_proj|fc1)"
PARTS = ("text_encoder", "text_encoder_2", "transformer")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("synthetic:sd35-tiny?seed=3", digests=PlainDigests(), download=False)


@pytest.fixture(scope="module")
def modules(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: load_module(name, checkpoint.submodels[name].load) for name in PARTS}


@pytest.fixture(scope="module")
def weights(modules: dict[str, Any]) -> Weights:
    return {name: module.state_dict() for name, module in modules.items()}


def pair(stem: str, weight: torch.Tensor, roles: tuple[str, str] = ("lora_down", "lora_up")) -> Tensors:
    """Two factors for a weight, each stem with its own."""
    random = torch.Generator().manual_seed(sum(map(ord, stem)))
    down = torch.randn((RANK, *weight.shape[1:]), generator=random) * 0.1
    up = torch.randn((len(weight), RANK, *(1 for _ in weight.shape[2:])), generator=random) * 0.1
    return {f"{stem}.{roles[0]}.weight": down, f"{stem}.{roles[1]}.weight": up}


def kohya_text(weights: Weights) -> Tensors:
    found: Tensors = {}
    for number, name in enumerate(PARTS[:2], 1):
        for key, weight in weights[name].items():
            if "layers.1." in key and weight.ndim == 2:
                module = key.removesuffix(".weight").removeprefix("text_model.").replace(".", "_")
                stem = f"lora_te{number}_text_model_{module}"
                found |= pair(stem, weight) | {f"{stem}.alpha": torch.tensor(ALPHA)}
    return found


def original(modules: dict[str, Any], dotted: bool) -> Tensors:
    """Over the original layout, every module of it: as kohya's sd-scripts write it, or ComfyUI with dots."""
    found: Tensors = {}
    for key, weight in mmdit_tensors(modules["transformer"]).items():
        if not key.endswith(".weight") or weight.ndim < 2:
            continue
        module = key.removesuffix(".weight")
        if dotted:
            found |= pair(f"diffusion_model.{module}", weight)
        else:
            stem = f"lora_unet_{module.replace('.', '_')}"
            found |= pair(stem, weight) | {f"{stem}.alpha": torch.tensor(ALPHA)}
    return found


def underscored(prefix: str, weights: Weights) -> Tensors:
    """diffusers' own modules with underscores: OneTrainer's."""
    found: Tensors = {}
    for key, weight in weights["transformer"].items():
        if key.endswith(".weight") and weight.ndim >= 2:
            found |= pair(prefix + key.removesuffix(".weight").replace(".", "_"), weight)
    return found


def expected(tensors: Tensors, modules: dict[str, Any], weights: Weights) -> Tensors:
    """W + scale * alpha / rank * up @ down on the original tensors, back in diffusers' layout by diffusers' converter."""
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    whole = {name: tensor.clone() for name, tensor in mmdit_tensors(modules["transformer"]).items()}
    for name, tensor in whole.items():
        module = name.removesuffix(".weight")
        for stem in (f"lora_unet_{module.replace('.', '_')}", f"diffusion_model.{module}"):
            if f"{stem}.lora_up.weight" in tensors:
                up, down = tensors[f"{stem}.lora_up.weight"], tensors[f"{stem}.lora_down.weight"]
                alpha = float(tensors.get(f"{stem}.alpha", torch.tensor(RANK)))
                tensor += SCALE * alpha / RANK * (up.reshape(-1, RANK) @ down.reshape(RANK, -1)).reshape(tensor.shape)
    converted: Tensors = convert_sd3_transformer_checkpoint_to_diffusers(whole)
    return converted


def written(folder: Path, tensors: Tensors) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "lora.safetensors")
    return folder / "lora.safetensors"


def merged(checkpoint: Checkpoint, weights: Weights, path: Path) -> Weights:
    """By sdflow."""
    require_made_for(path, checkpoint)
    shapes = {name: {key: tuple(each.shape) for key, each in state.items()} for name, state in weights.items()}
    found = {name: dict(state) for name, state in weights.items()}
    for name, layers in read_lora(path, shapes, checkpoint.family.name).items():
        for key, layer in layers.items():
            found[name][key] = weights[name][key] + torch.from_numpy(lora_delta(layer, shapes[name][key], SCALE))
    return found


def reference(checkpoint: Checkpoint, path: Path) -> Weights:
    """By diffusers and PEFT, as verification has it."""
    found = {}
    for name in PARTS:
        module = load_module(name, checkpoint.submodels[name].load)
        merge_lora(module, name, checkpoint.family, checkpoint.submodels["transformer"].load["config"], path, SCALE)
        found[name] = module.state_dict()
    return found


def assert_same(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    apart = [key for key in one if torch.linalg.vector_norm(one[key] - other[key]) > 1e-5 * one[key].norm()]
    assert not apart


def changed(one: Tensors, other: Tensors) -> int:
    return sum(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("dotted", [False, True], ids=["kohya", "ComfyUI"])
def test_names_of_the_original_layout_change_the_rows_of_the_original_tensors(
    dotted: bool, checkpoint: Checkpoint, modules: dict[str, Any], weights: Weights, tmp_path: Path
) -> None:
    tensors = original(modules, dotted)
    path = written(tmp_path, tensors)
    assert lora_submodels(path) == ("transformer",)
    ours = merged(checkpoint, weights, path)
    matrices = sum(key.endswith(".weight") and each.ndim >= 2 for key, each in weights["transformer"].items())
    assert changed(ours["transformer"], weights["transformer"]) == matrices, "every matrix and the patches' convolution"
    assert_same(ours["transformer"], expected(tensors, modules, weights))
    assert_same(reference(checkpoint, path)["transformer"], ours["transformer"])


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_"])
def test_underscores_over_diffusers_names_and_both_clips_are_read(
    prefix: str, checkpoint: Checkpoint, weights: Weights, tmp_path: Path
) -> None:
    path = written(tmp_path, underscored(prefix, weights) | kohya_text(weights))
    assert set(lora_submodels(path)) == set(PARTS)
    ours, theirs = merged(checkpoint, weights, path), reference(checkpoint, path)
    for name in PARTS:
        assert changed(ours[name], weights[name]) > 5
        assert_same(ours[name], theirs[name])


def test_what_diffusers_saves_is_merged_as_diffusers_fuses_it(
    checkpoint: Checkpoint, weights: Weights, tmp_path: Path
) -> None:
    from diffusers.training_utils import _collate_lora_metadata
    from peft import LoraConfig, get_peft_model_state_dict

    pipeline = load_pipeline(checkpoint)
    random = torch.Generator().manual_seed(7)
    modules = {name: getattr(pipeline, name) for name in PARTS}
    for name, module in modules.items():
        module.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=FEW if name == "transformer" else TEXT))
        for key, parameter in module.named_parameters():
            if "lora_B" in key:
                parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    layers = {f"{name}_lora_layers": get_peft_model_state_dict(module) for name, module in modules.items()}
    pipeline.save_lora_weights(tmp_path, **layers, **_collate_lora_metadata(modules))
    (path,) = tmp_path.glob("*.safetensors")
    theirs = load_pipeline(checkpoint)
    theirs.load_lora_weights(str(tmp_path), weight_name=path.name)
    theirs.fuse_lora(components=list(PARTS), lora_scale=SCALE)
    theirs.unload_lora_weights()
    ours, verified = merged(checkpoint, weights, path), reference(checkpoint, path)
    for name in PARTS:
        assert changed(ours[name], weights[name]) >= 3
        assert_same(ours[name], getattr(theirs, name).state_dict())
        assert_same(verified[name], ours[name])


def test_a_folder_of_peft_is_merged_as_peft_merges_it(checkpoint: Checkpoint, weights: Weights, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    module = load_module("transformer", checkpoint.submodels["transformer"].load)
    wrapped = get_peft_model(module, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=FEW, init_lora_weights=False))
    wrapped.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == ALPHA
    path = tmp_path / "adapter_model.safetensors"
    assert lora_submodels(path) == ("transformer",)
    ours, verified = merged(checkpoint, weights, path), reference(checkpoint, path)
    for layer in wrapped.base_model.model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(SCALE)
    assert_same(wrapped.merge_and_unload().state_dict(), ours["transformer"])
    assert_same(verified["transformer"], ours["transformer"])


def test_two_spellings_of_the_same_rows_are_refused(
    checkpoint: Checkpoint, modules: dict[str, Any], weights: Weights, tmp_path: Path
) -> None:
    fused = original(modules, dotted=False)
    key = "transformer_blocks.0.attn.to_k.weight"
    path = written(tmp_path, fused | pair("lora_unet_transformer_blocks_0_attn_to_k", weights["transformer"][key]))
    with pytest.raises(CheckpointError, match="there are others for transformer_blocks.0.attn.to_k.weight"):
        merged(checkpoint, weights, path)
    with pytest.raises(VerificationError, match="twice"):
        reference(checkpoint, path)


def test_a_lora_of_another_model_is_refused_by_what_it_is_for(
    checkpoint: Checkpoint, weights: Weights, tmp_path: Path
) -> None:
    path = written(tmp_path, pair("lora_unet_joint_blocks_37_x_block_attn_proj", torch.zeros(64, 64)))
    with pytest.raises(CheckpointError, match="this transformer has"):
        require_made_for(path, checkpoint)
    unet = written(tmp_path, pair("lora_unet_mid_block_attentions_0_proj_in", torch.zeros(64, 64)))
    with pytest.raises(CheckpointError, match="has no unet"):
        require_made_for(unet, checkpoint)


def test_a_lora_of_t5_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = written(tmp_path, pair("lora_te3_encoder_block_0_layer_0_SelfAttention_q", torch.zeros(64, 64)))
    with pytest.raises(CheckpointError, match=r"not merged \(text_encoder_3\): lora_te3_"):
        require_made_for(path, checkpoint)
