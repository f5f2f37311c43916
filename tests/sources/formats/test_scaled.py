"""float8 and int8 safetensors: the values are those of PyTorch's arithmetic with the scales, and of comfy-kitchen's rotation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from low_bit_files import described, to_float8, write_fp8_scaled
from original_layout import flux_tensors, original_layout, stable_diffusion_1
from safetensors.torch import save_file

from sdflow.errors import CheckpointError
from sdflow.sources import Checkpoint, load_module
from sdflow.sources.formats import open_weights
from sdflow.sources.formats.plain import float8_values
from tests.sources.formats.test_gguf import assert_same_bits, module, opened, streamed

FLUX = "synthetic:flux1-schnell-tiny"


@pytest.fixture(scope="module")
def flux() -> dict[str, torch.Tensor]:
    """The tensors of a tiny FLUX.1 transformer in the original names."""
    return flux_tensors(load_module("transformer", opened(FLUX).submodels["transformer"].load))


def with_transformer(path: Path) -> Checkpoint:
    return opened(FLUX, components={"transformer": str(path)})


def written(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata)
    return path


@pytest.mark.parametrize(
    ("name", "kind"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)], ids=lambda each: str(each)
)
def test_every_byte_of_float8_is_torchs_value(name: str, kind: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(kind).float().numpy()
    assert np.array_equal(float8_values(name), every, equal_nan=True)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_fp8_scaled(flux: dict[str, torch.Tensor], prefix: str, tmp_path: Path) -> None:
    exact = write_fp8_scaled(tmp_path / "flux_fp8_scaled.safetensors", flux, prefix)
    found = with_transformer(tmp_path / "flux_fp8_scaled.safetensors")
    loaded = module(found, "transformer")
    assert_same_bits(flux_tensors(loaded), exact)
    assert_same_bits(streamed(found, "transformer"), loaded.state_dict())
    said = found.provenance["components"]["transformer"]["quantized"]
    assert said["format"] == "fp8_scaled" and said["types"]["F8_E4M3"] > 20


def test_a_scale_joins_the_identity(flux: dict[str, torch.Tensor], tmp_path: Path) -> None:
    def identity(path: Path) -> Any:
        return with_transformer(path).submodels["transformer"].identity

    path = tmp_path / "a.safetensors"
    write_fp8_scaled(path, flux)
    before = identity(path)
    write_fp8_scaled(path, {**flux, "img_in.weight": flux["img_in.weight"] * 2})
    assert identity(path) != before


def quantized_int8(weight: torch.Tensor, *, rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (weight.abs().amax(dim=1, keepdim=True) if rows else weight.abs().max()) / 127
    return (weight / scale).round().clamp(-128, 127).to(torch.int8), scale.float()


def hadamard(size: int) -> torch.Tensor:
    """comfy-kitchen's, as arXiv 2512.03673 has it: a Kronecker power, normalized."""
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    found = four
    while found.shape[0] < size:
        found = torch.kron(found, four)
    return found / size**0.5


def as_comfy_quant(
    tensors: Mapping[str, torch.Tensor], how: str, group: int = 16
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """What a file holds without descriptions, what its values are, and the descriptions of its layers."""
    held: dict[str, torch.Tensor] = {}
    exact, layers = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight"):
            held[name], exact[name] = tensor.to(torch.bfloat16), tensor.to(torch.bfloat16).float()
            continue
        layer = name.removesuffix(".weight")
        if how.startswith("float8"):
            kind = getattr(torch, how)
            values, scale = to_float8(tensor, kind)
            exact[name], layers[layer] = values.float() * scale, {"format": how}
        elif how == "convrot" and tensor.shape[1] % group == 0:
            turned = (tensor.double().reshape(len(tensor), -1, group) @ hadamard(group).T).reshape(tensor.shape)
            values, scale = quantized_int8(turned.float(), rows=True)
            back = values.double().reshape(len(tensor), -1, group) @ hadamard(group).T
            exact[name] = (back.reshape(tensor.shape) * scale.double()).float()
            layers[layer] = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
        else:
            values, scale = quantized_int8(tensor, rows=how == "rows")
            exact[name], layers[layer] = values.float() * scale, {"format": "int8_tensorwise"}
        held |= {name: values, f"{layer}.weight_scale": scale}
    return held, exact, layers


@pytest.mark.parametrize("where", ["tensors", "header"])
@pytest.mark.parametrize("how", ["float8_e4m3fn", "float8_e5m2", "tensor", "rows"])
def test_comfy_quant(flux: dict[str, torch.Tensor], how: str, where: str, tmp_path: Path) -> None:
    held, exact, layers = as_comfy_quant(flux, how)
    if where == "tensors":
        held |= {f"{layer}.comfy_quant": described(**each) for layer, each in layers.items()}
        path = written(tmp_path / "x.safetensors", held)
    else:
        text = json.dumps({"format_version": "1.0", "layers": layers})
        path = written(tmp_path / "x.safetensors", held, {"_quantization_metadata": text})
    found = with_transformer(path)
    loaded = module(found, "transformer")
    assert_same_bits(flux_tensors(loaded), exact)
    assert_same_bits(streamed(found, "transformer"), loaded.state_dict())
    assert found.provenance["components"]["transformer"]["quantized"]["format"] == "comfy_quant"


@pytest.mark.parametrize("group", [4, 16, 64])
def test_int8_that_was_rotated_is_turned_back(flux: dict[str, torch.Tensor], group: int, tmp_path: Path) -> None:
    """To float32's rounding of the exact product, and as near as comfy-kitchen's own float32 product to it."""
    held, exact, layers = as_comfy_quant(flux, "convrot", group)
    rotated = [layer for layer, each in layers.items() if each.get("convrot")]
    assert len(rotated) > 20
    held |= {f"{layer}.comfy_quant": described(**each) for layer, each in layers.items()}
    found = flux_tensors(module(with_transformer(written(tmp_path / "x.safetensors", held)), "transformer"))
    for layer in rotated:
        name = f"{layer}.weight"
        ours, right = found[name].double(), exact[name].double()
        assert float((ours - right).abs().max()) <= 2**-23 * float(right.abs().max())
        plain = held[name].float() * held[f"{layer}.weight_scale"]
        kitchen = (plain.reshape(len(plain), -1, group) @ hadamard(group).float().T).reshape(plain.shape)
        assert float((ours - kitchen).abs().max()) <= 2**-20 * float(right.abs().max())
        assert float((ours - flux[name]).abs().max()) < 0.05 * float(flux[name].abs().max())


def test_groups_of_256_are_rotated_in_steps(tmp_path: Path) -> None:
    weight = torch.randn(40, 1024, generator=torch.Generator().manual_seed(0))
    held, exact, layers = as_comfy_quant({"one.weight": weight}, "convrot", 256)
    path = written(tmp_path / "x.safetensors", {**held, "one.comfy_quant": described(**layers["one"])})
    tensor = open_weights(path).tensors["one.weight"]
    right = exact["one.weight"].numpy()
    assert np.abs(tensor.values() - right).max() <= 2**-23 * np.abs(right).max()
    assert np.array_equal(tensor.values(slice(3, 17)), tensor.values()[3:17])


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_whole_checkpoint_in_float8(kind: torch.dtype, tmp_path: Path) -> None:
    tensors = original_layout(opened("synthetic:sd15-tiny"))
    cast = {name: each.to(kind) if each.is_floating_point() else each for name, each in tensors.items()}
    found = opened(str(written(tmp_path / "sd15_fp8.safetensors", cast)))
    assert found.provenance["architecture"] == "sd15-tiny" and found.provenance["quantized"]["format"] == "float8"
    parts = stable_diffusion_1(*(module(found, name) for name in ("unet", "vae_decoder", "text_encoder")))
    for name, each in parts.items():
        if not name.endswith("position_ids") and name != "alphas_cumprod":
            assert torch.equal(each, cast[name].float()), name


REFUSED = {
    "SVDQuant": {"blocks.0.qweight": torch.zeros(2, dtype=torch.int8), "blocks.0.wscales": torch.zeros(2)},
    "NF4": {"a.weight": torch.zeros(2, dtype=torch.uint8), "a.weight.quant_state.bitsandbytes__nf4": torch.zeros(2)},
    "LLM.int8": {"a.weight": torch.zeros(2, dtype=torch.int8), "a.SCB": torch.zeros(2)},
    "SDNQ": {"a.weight": torch.zeros(2, dtype=torch.uint8), "a.scale": torch.zeros(2)},
    "GPTQ or AWQ": {"a.qweight": torch.zeros(2, dtype=torch.int32), "a.qzeros": torch.zeros(2)},
    "nvfp4": {
        "a.weight": torch.zeros(2, 2, dtype=torch.uint8), "a.weight_scale": torch.zeros(2),
        "a.comfy_quant": described(format="nvfp4"),
    },
    "convrot_w4a4": {
        "a.weight": torch.zeros(2, 2, dtype=torch.int8), "a.weight_scale": torch.zeros(2),
        "a.comfy_quant": described(format="convrot_w4a4"),
    },
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_read_is_refused_by_its_name(named: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", REFUSED[named])
    for refused in (lambda: opened(str(path)), lambda: with_transformer(path)):
        with pytest.raises(CheckpointError, match=named):
            refused()


def int8(**changed: Any) -> dict[str, torch.Tensor]:
    values = {"weight": torch.ones(4, 8, dtype=torch.int8), "weight_scale": torch.ones(4, 1), **changed}
    return {f"a.{name}": each for name, each in values.items() if each is not None}


DESCRIBED = described(format="int8_tensorwise")
DAMAGED = {
    "a.weight_scale is NaN or infinite": int8(weight_scale=torch.full((4, 1), float("nan")), comfy_quant=DESCRIBED),
    r"a.weight_scale is \[8\] for a weight of": int8(weight_scale=torch.ones(8), comfy_quant=DESCRIBED),
    "a.weight has 0 scales": int8(weight_scale=None, comfy_quant=DESCRIBED),
    "a.weight has 2 scales": int8(scale_weight=torch.ones(1), comfy_quant=DESCRIBED),
    "a.weight is missing": int8(weight=None, comfy_quant=DESCRIBED),
    "is of dtype F32, but described as int8_tensorwise": int8(weight=torch.ones(4, 8), comfy_quant=DESCRIBED),
    "without a description of its quantization": int8(),
    "which is not a power of 4": int8(
        comfy_quant=described(format="int8_tensorwise", convrot=True, convrot_groupsize=8)
    ),
    "groups of 16 for a weight": int8(
        comfy_quant=described(format="int8_tensorwise", convrot=True, convrot_groupsize=16)
    ),
    "groups of 'x'": int8(
        comfy_quant=described(format="int8_tensorwise", params={"convrot": 1, "convrot_groupsize": "x"})
    ),
    "is not JSON": int8(comfy_quant=torch.full((3,), 65, dtype=torch.uint8)),
    "is not a description": int8(comfy_quant=torch.zeros(5000, dtype=torch.uint8)),
}


@pytest.mark.parametrize("found", DAMAGED)
def test_a_description_that_cannot_be_is_told(found: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=found):
        open_weights(written(tmp_path / "x.safetensors", DAMAGED[found]))


def test_a_folder_is_refused_by_the_method_that_its_config_names(tmp_path: Path) -> None:
    module(opened(FLUX), "transformer").save_pretrained(tmp_path / "transformer")
    config = tmp_path / "transformer/config.json"
    for method in ("sdnq", "bitsandbytes"):
        said = {**json.loads(config.read_text()), "quantization_config": {"quant_method": method}}
        config.write_text(json.dumps(said))
        with pytest.raises(CheckpointError, match=rf"quantized \({method}\), which sdflow does not read"):
            with_transformer(tmp_path / "transformer")
