"""LoRAs: the merged weights are diffusers' own, in every key style, and no tensor of a file is dropped."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.models.ldm_names import ldm_unet_names
from sdflow.sources import Checkpoint, load_module, load_pipeline
from sdflow.sources.loras.layers import lora_delta
from sdflow.sources.loras.lora import lora_submodels, read_lora

Shapes = dict[str, dict[str, tuple[int, ...]]]
Tensors = dict[str, torch.Tensor]

# One block of each kind: peft takes a while for each layer.
UNET_ATTENTION = re.compile(r"^(down_blocks\.0|mid_block|up_blocks\.2)\..*attn[12]\.(to_q|to_k|to_v|to_out\.0)$")
UNET_MODULES = re.compile(
    r"^(down_blocks\.2|mid_block|up_blocks\.2)\..*(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)|proj_in"
    r"|proj_out|conv1|conv2|conv_shortcut|time_emb_proj|samplers\.0\.conv)$|^time_embedding\.linear_[12]$"
)
TEXT_MODULES = re.compile(r"(q_proj|k_proj|v_proj|out_proj|fc1|fc2)$")


@pytest.fixture(scope="module")
def weights(tiny: Checkpoint) -> dict[str, Tensors]:
    return {name: load_module(name, tiny.submodels[name].load).state_dict() for name in ("unet", "text_encoder")}


@pytest.fixture(scope="module")
def shapes(weights: dict[str, Tensors]) -> Shapes:
    return {name: {key: tuple(t.shape) for key, t in tensors.items()} for name, tensors in weights.items()}


def factors(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    down = torch.randn((rank, *shape[1:]), generator=generator) * 0.1
    up = torch.randn((shape[0], rank, *(1 for _ in shape[2:])), generator=generator) * 0.1
    return up, down


def modules(shapes: Shapes, submodel: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, shape in shapes[submodel].items():
        if key.endswith(".weight") and len(shape) > 1 and pattern.search(key.removesuffix(".weight")):
            yield key.removesuffix(".weight"), shape


def peft_lora(shapes: Shapes, rank: int = 4, seed: int = 0) -> Tensors:
    """As diffusers writes it today."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for submodel, pattern in (("unet", UNET_MODULES), ("text_encoder", TEXT_MODULES)):
        for module, shape in modules(shapes, submodel, pattern):
            up, down = factors(shape, rank, generator)
            tensors[f"{submodel}.{module}.lora_B.weight"] = up
            tensors[f"{submodel}.{module}.lora_A.weight"] = down
    return tensors


def old_diffusers_lora(shapes: Shapes, rank: int = 4) -> Tensors:
    """As diffusers wrote it in 2023: attention processors, `lora_linear_layer` in the text encoder."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module, shape in modules(shapes, "unet", UNET_ATTENTION):
        parent, _, last = module.removesuffix(".0").rpartition(".")
        up, down = factors(shape, rank, generator)
        tensors[f"unet.{parent}.processor.{last}_lora.up.weight"] = up
        tensors[f"unet.{parent}.processor.{last}_lora.down.weight"] = down
    for module, shape in modules(shapes, "text_encoder", TEXT_MODULES):
        up, down = factors(shape, rank, generator)
        tensors[f"text_encoder.text_model.{module}.lora_linear_layer.up.weight"] = up
        tensors[f"text_encoder.text_model.{module}.lora_linear_layer.down.weight"] = down
    return tensors


def kohya_lora(shapes: Shapes, *, original_names: bool = False, rank: int = 4, alpha: float = 2.0) -> Tensors:
    """As kohya's sd-scripts write it, over diffusers' module names or over the original UNet's."""
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    names = ldm_unet_names(key.removesuffix(".weight") for key in shapes["unet"]) if original_names else {}
    for submodel, pattern, prefix in (
        ("unet", UNET_MODULES, "lora_unet_"),
        ("text_encoder", TEXT_MODULES, "lora_te_text_model_"),
    ):
        for module, shape in modules(shapes, submodel, pattern):
            stem = prefix + names.get(module, module).replace(".", "_")
            up, down = factors(shape, rank, generator)
            tensors |= {f"{stem}.lora_up.weight": up, f"{stem}.lora_down.weight": down}
            tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def written(folder: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, folder / "lora.safetensors", metadata)
    return folder / "lora.safetensors"


def merged(path: Path, weights: dict[str, Tensors], shapes: Shapes, scale: float) -> dict[str, Tensors]:
    layers = read_lora(path, shapes)
    result = {}
    for submodel, tensors in weights.items():
        result[submodel] = dict(tensors)
        for key, layer in layers[submodel].items():
            result[submodel][key] = tensors[key] + torch.from_numpy(lora_delta(layer, shapes[submodel][key], scale))
    return result


def fused_by_diffusers(tiny: Checkpoint, loras: list[tuple[Path, float]]) -> dict[str, Tensors]:
    pipeline = load_pipeline(tiny)
    for path, scale in loras:
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name)
        pipeline.fuse_lora(lora_scale=scale)
        pipeline.unload_lora_weights()
    return {name: getattr(pipeline, name).state_dict() for name in ("unet", "text_encoder")}


def assert_equal(ours: dict[str, Tensors], theirs: dict[str, Tensors], base: dict[str, Tensors], changed: int) -> None:
    different = 0
    for submodel in ours:
        assert ours[submodel].keys() == theirs[submodel].keys()
        for key, tensor in ours[submodel].items():
            assert torch.linalg.vector_norm(tensor - theirs[submodel][key]) <= 1e-6 * torch.linalg.vector_norm(tensor)
            different += not torch.equal(tensor, base[submodel][key])
    assert different == changed


@pytest.mark.parametrize("style", [peft_lora, old_diffusers_lora, kohya_lora])
def test_merged_weights_equal_diffusers(
    style: Callable[[Shapes], Tensors], tiny: Checkpoint, weights: dict[str, Tensors], shapes: Shapes, tmp_path: Path
) -> None:
    tensors = style(shapes)
    file = written(tmp_path, tensors)
    layers = sum(len(part) for part in read_lora(file, shapes).values())
    assert layers == sum(name.endswith(("up.weight", "lora_B.weight")) for name in tensors)
    assert_equal(merged(file, weights, shapes, 0.7), fused_by_diffusers(tiny, [(file, 0.7)]), weights, layers)


def test_kohya_over_the_original_names_equals_kohya_over_diffusers_names(shapes: Shapes, tmp_path: Path) -> None:
    """diffusers drops these for Stable Diffusion 1.x with a warning, so it cannot be the reference here."""
    original = kohya_lora(shapes, original_names=True)
    assert "lora_unet_output_blocks_8_2_conv.lora_up.weight" in original
    assert "lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k.alpha" in original
    (tmp_path / "a").mkdir()
    found = read_lora(written(tmp_path / "a", original), shapes)
    expected = read_lora(written(tmp_path, kohya_lora(shapes)), shapes)
    for submodel in expected:
        assert found[submodel].keys() == expected[submodel].keys()
        for key, layer in expected[submodel].items():
            assert np.array_equal(found[submodel][key].up, layer.up)
            assert np.array_equal(found[submodel][key].down, layer.down)
            assert found[submodel][key].scale == layer.scale == 0.5


def test_several_loras_with_scales_equal_diffusers(
    tiny: Checkpoint, weights: dict[str, Tensors], shapes: Shapes, tmp_path: Path
) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(peft_lora(shapes, rank=2), first)
    save_file(kohya_lora(shapes, rank=8, alpha=4.0), second)
    ours = merged(second, merged(first, weights, shapes, 0.8), shapes, -0.5)
    layers = len(read_lora(first, shapes)["unet"]) + len(read_lora(first, shapes)["text_encoder"])
    assert_equal(ours, fused_by_diffusers(tiny, [(first, 0.8), (second, -0.5)]), weights, layers)


def test_a_mixed_file_is_read_whole(shapes: Shapes, tmp_path: Path) -> None:
    """diffusers' loader drops one of the styles of such a file."""
    peft = {name: tensor for name, tensor in peft_lora(shapes).items() if name.startswith("unet.")}
    kohya = {name: tensor for name, tensor in kohya_lora(shapes).items() if name.startswith("lora_te_")}
    layers = read_lora(written(tmp_path, peft | kohya), shapes)
    assert len(layers["unet"]) == len(peft) // 2
    assert len(layers["text_encoder"]) == len(kohya) // 3


def test_a_submodel_reads_its_own_part(shapes: Shapes, tmp_path: Path) -> None:
    file = written(tmp_path, kohya_lora(shapes))
    assert lora_submodels(file) == ("text_encoder", "unet")
    alone = read_lora(file, {"text_encoder": shapes["text_encoder"]})
    assert alone.keys() == {"text_encoder"}
    assert alone["text_encoder"].keys() == read_lora(file, shapes)["text_encoder"].keys()
    assert lora_submodels(written(tmp_path, old_diffusers_unet_without_prefix(shapes))) == ("unet",)


def old_diffusers_unet_without_prefix(shapes: Shapes) -> Tensors:
    """As diffusers' first training script wrote it."""
    tensors = old_diffusers_lora(shapes)
    return {name.removeprefix("unet."): tensor for name, tensor in tensors.items() if name.startswith("unet.")}


def test_the_first_files_without_a_prefix_are_read(shapes: Shapes, tmp_path: Path) -> None:
    tensors = old_diffusers_unet_without_prefix(shapes)
    assert len(read_lora(written(tmp_path, tensors), shapes)["unet"]) == len(tensors) // 2


STEM = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"


def test_every_tensor_without_a_place_is_named(shapes: Shapes, tmp_path: Path) -> None:
    tensors = kohya_lora(shapes)
    strays = [
        "lora_unet_down_blocks_9_resnets_0_conv1.lora_up.weight",
        "lora_unet_down_blocks_9_resnets_0_conv1.lora_down.weight",
        "lora_te_text_model_encoder_layers_11_mlp_fc1.alpha",
    ]
    tensors |= {name: torch.zeros(4, 4) for name in strays}
    with pytest.raises(CheckpointError) as caught:
        read_lora(written(tmp_path, tensors), shapes)
    assert all(name in str(caught.value) for name in strays)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("lost", ["lora_up.weight", "lora_down.weight"])
def test_a_tensor_without_its_partner_is_named(lost: str, shapes: Shapes, tmp_path: Path) -> None:
    tensors = kohya_lora(shapes)
    del tensors[f"{STEM}.{lost}"]
    with pytest.raises(CheckpointError, match=rf"{STEM}.*the {lost.split('_')[1].split('.')[0]} tensor is missing"):
        read_lora(written(tmp_path, tensors), shapes)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{STEM}.lora_up.weight", torch.zeros(64, 5)),
        (f"{STEM}.lora_down.weight", torch.zeros(4, 63)),
        (f"{STEM}.lora_down.weight", torch.zeros(4, 64, 3, 3)),
        (f"{STEM}.lora_down.weight", torch.zeros(0, 64)),
        (f"{STEM}.alpha", torch.zeros(2)),
        (f"{STEM}.lora_up.weight", torch.full((64, 4), torch.nan)),
    ],
)
def test_a_wrong_shape_or_value_is_named(name: str, tensor: torch.Tensor, shapes: Shapes, tmp_path: Path) -> None:
    tensors = kohya_lora(shapes) | {name: tensor}
    with pytest.raises(CheckpointError, match=re.escape(STEM)):
        read_lora(written(tmp_path, tensors), shapes)


def test_two_spellings_of_one_module_are_an_error(shapes: Shapes, tmp_path: Path) -> None:
    module = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = kohya_lora(shapes) | {f"unet.{module}.lora_A.weight": torch.zeros(4, 64)}
    with pytest.raises(CheckpointError, match="is for the same weight"):
        read_lora(written(tmp_path, tensors), shapes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{STEM}.oft_blocks", "OFT"),
        ("unet.conv_in.lora_magnitude_vector.default", "DoRA of another form"),
        (f"{STEM}.hada_w3_a", "LoHa of another form"),
        (f"{STEM}.lokr_t1", "LoKr of another form"),
        (f"{STEM}.a1.weight", "GLoRA"),
        (f"{STEM}.on_input", "IA"),
    ],
)
def test_other_adapters_are_refused_by_name(name: str, kind: str, shapes: Shapes, tmp_path: Path) -> None:
    file = written(tmp_path, kohya_lora(shapes) | {name: torch.zeros(4)})
    for read in (lambda: read_lora(file, shapes), lambda: lora_submodels(file)):
        with pytest.raises(CheckpointError, match=kind):
            read()


@pytest.mark.parametrize("tensors", [{"model.weight": torch.zeros(3)}, {}])
def test_a_file_that_is_no_lora_is_refused(tensors: Tensors, shapes: Shapes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"do not belong to a LoRA: model\.weight|holds no tensors"):
        read_lora(written(tmp_path, tensors), shapes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(dtype: torch.dtype, shapes: Shapes, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in peft_lora(shapes).items()}
    layers = read_lora(written(tmp_path, tensors), shapes)
    up = tensors["unet.mid_block.resnets.0.conv1.lora_B.weight"].float().numpy().reshape(64, 4)
    assert np.array_equal(layers["unet"]["mid_block.resnets.0.conv1.weight"].up, up)
