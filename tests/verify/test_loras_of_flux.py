"""LoRAs of FLUX.1 in every spelling: sdflow's reader, the verification's reference, and diffusers, PEFT or the arithmetic on the
tensors of the original layout agree on every weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from original_layout import flux_tensors
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
FEW = (
    r"(single_)?transformer_blocks\.1\..*(to_q|to_k|to_v|add_k_proj|to_out\.0|to_add_out|net\.2|proj_mlp|proj_out|linear)"
    r"|norm_out\.linear|x_embedder"
)
TEXT = r".*layers\.1\..*(q_proj|out_proj|fc1)"
PARTS = ("text_encoder", "transformer")
BLOCK = "single_transformer_blocks.0"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("synthetic:flux1-dev-tiny?seed=3", digests=PlainDigests(), download=False)


@pytest.fixture(scope="module")
def modules(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: load_module(name, checkpoint.submodels[name].load) for name in PARTS}


@pytest.fixture(scope="module")
def weights(modules: dict[str, Any]) -> Weights:
    return {name: module.state_dict() for name, module in modules.items()}


def pair(stem: str, weight: torch.Tensor) -> Tensors:
    """Two factors for a weight, each stem with its own."""
    random = torch.Generator().manual_seed(sum(map(ord, stem)))
    down = torch.randn((RANK, weight.shape[1]), generator=random) * 0.1
    up = torch.randn((len(weight), RANK), generator=random) * 0.1
    return {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}


def kohya_text(weights: Weights) -> Tensors:
    found: Tensors = {}
    for key, weight in weights["text_encoder"].items():
        if "layers.1." in key and weight.ndim == 2:
            module = key.removesuffix(".weight").removeprefix("text_model.").replace(".", "_")
            stem = f"lora_te1_text_model_{module}"
            found |= pair(stem, weight) | {f"{stem}.alpha": torch.tensor(ALPHA)}
    return found


def original(modules: dict[str, Any], dotted: bool) -> Tensors:
    """Over the original layout, every module of it: as kohya's sd-scripts write it, or ComfyUI with dots."""
    found: Tensors = {}
    for key, weight in flux_tensors(modules["transformer"]).items():
        if not key.endswith(".weight"):
            continue
        module = key.removesuffix(".weight")
        if dotted:
            found |= pair(f"diffusion_model.{module}", weight)
        else:
            stem = f"lora_unet_{module.replace('.', '_')}"
            found |= pair(stem, weight) | {f"{stem}.alpha": torch.tensor(ALPHA)}
    return found


def expected(tensors: Tensors, modules: dict[str, Any]) -> Tensors:
    """W + scale * alpha / rank * up @ down, on the original tensors of a module that then goes into the original layout."""
    whole = flux_tensors(modules["transformer"])
    for name, tensor in whole.items():
        module = name.removesuffix(".weight")
        for stem in (f"lora_unet_{module.replace('.', '_')}", f"diffusion_model.{module}"):
            if f"{stem}.lora_up.weight" in tensors:
                up, down = tensors[f"{stem}.lora_up.weight"], tensors[f"{stem}.lora_down.weight"]
                tensor += SCALE * float(tensors.get(f"{stem}.alpha", torch.tensor(RANK))) / RANK * (up @ down)
    return whole


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


def in_original_layout(checkpoint: Checkpoint, state: Tensors) -> Tensors:
    module: Any = load_module("transformer", checkpoint.submodels["transformer"].load)
    module.load_state_dict(state)
    return flux_tensors(module)


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
    ours, theirs = merged(checkpoint, weights, path), reference(checkpoint, path)
    assert_same(in_original_layout(checkpoint, ours["transformer"]), expected(tensors, modules))
    assert_same(ours["transformer"], theirs["transformer"])
    matrices = [key for key, weight in weights["transformer"].items() if weight.ndim == 2]
    assert changed(ours["transformer"], weights["transformer"]) == len(matrices)


def test_kohya_of_the_published_width_is_divided_as_diffusers_divides_it() -> None:
    """diffusers' reader knows blocks 3,072 wide alone: the places of one of each kind, without the rest of the model."""
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    from sdflow.families.flux.reference_loras import in_diffusers_names
    from sdflow.families.flux.transformer import FluxTransformer
    from sdflow.sources.loras.lora_names import rows_of, spellings

    config = {"attention_head_dim": 128, "num_attention_heads": 24, "num_layers": 1, "num_single_layers": 1}
    config |= {"joint_attention_dim": 4096, "pooled_projection_dim": 768, "in_channels": 64, "patch_size": 1}
    shapes = FluxTransformer().parameters(config)
    assert shapes is not None
    rows = {
        "double_blocks_0_img_attn_qkv": 9216,
        "double_blocks_0_txt_attn_qkv": 9216,
        "single_blocks_0_linear1": 21504,
    }
    rows |= {"single_blocks_0_linear2": 3072, "double_blocks_0_img_mod_lin": 18432, "double_blocks_0_txt_mlp_0": 12288}
    file: Tensors = {}
    for name, count in rows.items():
        down, up = torch.randn(2, 5), torch.randn(count, 2)
        file |= {f"lora_unet_{name}.lora_down.weight": down, f"lora_unet_{name}.lora_up.weight": up}
    theirs = _convert_kohya_flux_lora_to_diffusers(dict(file))
    pairs = {
        name: (file[f"lora_unet_{name}.lora_down.weight"], file[f"lora_unet_{name}.lora_up.weight"]) for name in rows
    }
    for name, tensor in in_diffusers_names(pairs, config).items():
        assert torch.equal(tensor, theirs.pop(name)), name
    assert not theirs
    table = spellings(FluxTransformer(), shapes)
    again = _convert_kohya_flux_lora_to_diffusers(dict(file))
    for name in rows:
        for place in table[name]:
            up = file[f"lora_unet_{name}.lora_up.weight"].numpy()
            stem = f"transformer.{place.name.removesuffix('.weight')}"
            assert torch.equal(torch.from_numpy(rows_of(up, place)), again.pop(f"{stem}.lora_B.weight"))
            again.pop(f"{stem}.lora_A.weight")
    assert not again


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_"])
def test_underscores_over_diffusers_names_and_clip_are_read(
    prefix: str, checkpoint: Checkpoint, weights: Weights, tmp_path: Path
) -> None:
    tensors = kohya_text(weights)
    for key, weight in weights["transformer"].items():
        if key.endswith(".weight") and weight.ndim == 2:
            tensors |= pair(prefix + key.removesuffix(".weight").replace(".", "_"), weight)
    path = written(tmp_path, tensors)
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
    diffusers.FluxPipeline.save_lora_weights(tmp_path, **layers, **_collate_lora_metadata(modules))
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
    path = written(tmp_path, fused | pair("lora_unet_" + f"{BLOCK}_proj_mlp".replace(".", "_"), torch.zeros(256, 64)))
    with pytest.raises(CheckpointError, match=f"there are others for {BLOCK}.proj_mlp.weight"):
        merged(checkpoint, weights, path)
    with pytest.raises(VerificationError, match="twice"):
        reference(checkpoint, path)


@pytest.mark.parametrize(
    ("stem", "why"),
    [
        ("lora_unet_double_blocks_18_img_attn_proj", "this transformer has 2 double blocks"),
        ("lora_unet_single_blocks_37_linear2", "this transformer has 2 single blocks"),
        ("transformer.single_transformer_blocks.37.proj_out", "this transformer has 2 single blocks"),
        ("lora_unet_txt_in", "for text embeddings 64 wide, not 96"),
        ("lora_unet_mid_block_attentions_0_proj_in", "has no unet"),
        ("lora_unet_input_blocks_4_1_proj_in", "has no unet"),
    ],
)
def test_a_lora_of_another_model_is_refused_by_what_it_is_for(
    stem: str, why: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=why):
        require_made_for(written(tmp_path, pair(stem, torch.zeros(64, 64))), checkpoint)


def test_a_lora_of_flux_is_refused_by_stable_diffusion_3(tmp_path: Path) -> None:
    other = open_checkpoint("synthetic:sd35-tiny", digests=PlainDigests(), download=False)
    path = written(tmp_path, pair("lora_unet_double_blocks_0_img_attn_proj", torch.zeros(64, 64)))
    with pytest.raises(CheckpointError, match="no such module"):
        read_lora(path, {"transformer": {"x_embedder.weight": (64, 64)}}, other.family.name)
