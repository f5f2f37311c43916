"""LoHa, LoKr, DoRA and differences in the names of every family: what is read is what the reference merges, by diffusers' names
and PEFT's functions, whole and weight by weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.sources import (
    Checkpoint,
    PlainDigests,
    load_module,
    lora_submodels,
    open_checkpoint,
    read_lora,
    require_made_for,
)
from sdflow.sources.loras.lora_names import spellings
from sdflow.verify.reference.merged_loras import merge_lora
from sdflow.verify.reference.streamed import _merged
from sdflow.weights.lora import merged_weight

State = dict[str, torch.Tensor]
Shape = Sequence[int]
Named = Mapping[str, tuple[str, str]]
"""Submodel -> the prefix of its names, and the modules whose names match."""

RANK = 2
SCALE = 0.7
ORIGINAL: dict[str, Named] = {
    "sd15-tiny": {
        "unet": ("lora_unet_", r"mid_block_(resnets_0_\w+|attentions_0_.*)"),
        "text_encoder": ("lora_te_", r"text_model_encoder_layers_0_\w+(q_proj|k_proj|fc1|layer_norm1)"),
    },
    "sdxl-tiny": {
        "unet": ("lora_unet_", r"middle_block_1_transformer_blocks_0_\w+|input_blocks_1_0_in_layers_[02]"),
        "text_encoder": ("lora_te1_", r"text_model_encoder_layers_0_self_attn_\w_proj"),
        "text_encoder_2": ("lora_te2_", r"text_model_encoder_layers_1_self_attn_\w_proj"),
    },
    "sd35-tiny": {
        "transformer": ("lora_unet_", r"joint_blocks_0_\w+|final_layer_\w+"),
        "text_encoder": ("lora_te1_", r"text_model_encoder_layers_0_self_attn_\w_proj"),
    },
    "flux1-dev-tiny": {
        "transformer": ("lora_unet_", r"(double|single)_blocks_0_\w+(qkv|proj|mlp_\d|linear\d|lin)|final_layer_\w+"),
        "text_encoder": ("lora_te1_", r"text_model_encoder_layers_0_self_attn_\w_proj"),
    },
    "flux2-tiny": {
        "transformer": (
            "diffusion_model.",
            r"(double|single)_blocks\.0\.[\w.]+(qkv|proj|mlp\.\d|linear\d)|final_layer\.linear",
        )
    },
    "z-image-tiny": {"transformer": ("lora_unet_", r"(layers|noise_refiner)_0_(attention_(qkv|out)|feed_forward_w\d)")},
}
OWN: dict[str, Named] = {
    "sd35-tiny": {"transformer": ("transformer.", r"transformer_blocks\.0\.attn\.(?!norm)\w+(\.0)?")},
    "flux1-dev-tiny": {"transformer": ("lycoris_", r"(single_)?transformer_blocks_0_(attn_(?!norm)\w+|proj_\w+)")},
    "flux2-tiny": {"transformer": ("transformer.", r"(single_)?transformer_blocks\.0\.attn\.(?!norm)\w+(\.0)?")},
    "z-image-tiny": {"transformer": ("diffusion_model.", r"layers\.0\.attention\.to_\w+(\.0)?")},
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.3


def lora(shape: Shape) -> State:
    up = random(shape[0], RANK, *(1 for _ in shape[2:]))
    return {"lora_down.weight": random(RANK, *shape[1:]), "lora_up.weight": up, "alpha": torch.tensor(3.0)}


def dora(shape: Shape) -> State:
    return {**lora(shape), "dora_scale": 1 + torch.rand(shape[0], *(1 for _ in shape[1:]))}


def loha(shape: Shape) -> State:
    sides = {"a": (shape[0], RANK), "b": (RANK, prod(shape[1:]))}
    factors = {f"hada_w{number}_{side}": random(*sides[side]) for number in "12" for side in "ab"}
    return {**factors, "alpha": torch.tensor(1.0)}


def lokr(shape: Shape) -> State:
    left = [next(divisor for divisor in (4, 3, 2, 1) if side % divisor == 0) for side in shape[:2]]
    return {
        "lokr_w1": random(*left),
        "lokr_w2_a": random(shape[0] // left[0], RANK),
        "lokr_w2_b": random(RANK, prod(shape[1:]) // left[1]),
        "dora_scale": 1 + torch.rand(shape[0], *(1 for _ in shape[1:])),
        "alpha": torch.tensor(1.0),
    }


def difference(shape: Shape) -> State:
    return {"diff": random(*shape)}


KINDS: tuple[Callable[[Shape], State], ...] = (lora, dora, loha, lokr, difference)


def opened(architecture: str) -> Checkpoint:
    return open_checkpoint(f"synthetic:{architecture}?seed=3", digests=PlainDigests(), download=False)


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def tensors_of(checkpoint: Checkpoint, submodel: str, state: State, prefix: str, pattern: str) -> State:
    """A kind after the other for these modules; for norms a difference, for biases too."""
    tensors: State = {}
    shapes, taken, made = shapes_of(state), list[str](), 0
    for name, places in sorted(spellings(checkpoint.family.part(submodel).model, shapes, norms=True).items()):
        weights = [place.name for place in places]
        if not re.fullmatch(pattern, name) or name.endswith("to_out") or set(weights) & set(taken):
            continue
        taken += weights
        shape = (sum(shapes[key][0] for key in weights), *shapes[weights[0]][1:])
        if len(shape) == 1:
            found = {"w_norm": random(*shape)}
        else:
            made += 1
            found = KINDS[made % len(KINDS)](shape)
        own = "diff" if "diff" in found else "norm" if "w_norm" in found else ""
        if own and all(key.removesuffix("weight") + "bias" in shapes for key in weights):
            found["diff_b" if own == "diff" else "b_norm"] = random(shape[0])
        tensors |= {f"{prefix}{name}.{role}": tensor for role, tensor in found.items()}
    return tensors


def assert_the_reference_agrees(architecture: str, named: Named, path: Path) -> None:
    checkpoint = opened(architecture)
    modules = {name: load_module(name, checkpoint.submodels[name].load) for name in named}
    states = {name: {key: each.clone() for key, each in made.state_dict().items()} for name, made in modules.items()}
    torch.manual_seed(0)
    tensors: State = {}
    for name, (prefix, pattern) in named.items():
        tensors |= tensors_of(checkpoint, name, states[name], prefix, pattern)
    save_file(tensors, path)
    assert set(lora_submodels(path)) == set(named)
    require_made_for(path, checkpoint)
    layers = read_lora(path, {name: shapes_of(state) for name, state in states.items()}, checkpoint.family.name)
    assert len({type(layer) for found in layers.values() for layer in found.values()}) == 4, "all classes"
    denoiser = checkpoint.submodels[checkpoint.family.denoiser].load["config"]
    for name, module in modules.items():
        component, later = checkpoint.family.part(name).component, dict[str, list[Any]]()
        merge_lora(module, component, checkpoint.family, denoiser, path, SCALE, later)
        assert all(torch.equal(tensor, states[name][key]) for key, tensor in module.state_dict().items())
        changed = merge_lora(module, component, checkpoint.family, denoiser, path, SCALE)
        assert changed == len(layers[name]) == len(later) >= 3
        for key, theirs in module.state_dict().items():
            before = states[name][key]
            if key not in layers[name]:
                assert torch.equal(theirs, before), key
                continue
            ours = torch.from_numpy(merged_weight(before.numpy(), [(layers[name][key], SCALE)]))
            assert not torch.equal(ours, before), key
            for each in (theirs, _merged(later[key][0], before)):
                assert torch.linalg.vector_norm(ours - each) <= 2e-6 * torch.linalg.vector_norm(ours), key


@pytest.mark.parametrize("architecture", ORIGINAL)
def test_every_kind_merges_in_the_names_that_trainers_write(architecture: str, tmp_path: Path) -> None:
    assert_the_reference_agrees(architecture, ORIGINAL[architecture], tmp_path / "x.safetensors")


@pytest.mark.parametrize("architecture", OWN)
def test_every_kind_merges_in_the_names_of_diffusers(architecture: str, tmp_path: Path) -> None:
    assert_the_reference_agrees(architecture, OWN[architecture], tmp_path / "x.safetensors")


def test_norms_of_columns_that_several_weights_share_are_refused(tmp_path: Path) -> None:
    checkpoint, path = opened("flux1-dev-tiny"), tmp_path / "x.safetensors"
    shapes = shapes_of(load_module("transformer", checkpoint.submodels["transformer"].load).state_dict())
    rows, columns = shapes["transformer_blocks.0.attn.to_q.weight"]
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{stem}.{role}": tensor for role, tensor in lora((3 * rows, columns)).items()}
    save_file(tensors | {f"{stem}.dora_scale": torch.ones(1, columns)}, path)
    with pytest.raises(CheckpointError, match="share its norms of columns.*to_q.* and "):
        read_lora(path, {"transformer": shapes}, checkpoint.family.name)
