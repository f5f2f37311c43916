"""LoRAs of every module of a checkpoint, in the names and types of the programs that save them.

After their sources: kohya's sd-scripts (networks/lora.py), OneTrainer (convert_sd_lora.py, convert_sdxl_lora.py), ai-toolkit
(toolkit/lora_special.py), ComfyUI (nodes_lora_extract.py), diffusers (save_lora_weights, of today and of 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sdflow.models.ldm_names import ldm_unet_names
from sdflow.sources import Checkpoint, load_module

Tensors = dict[str, torch.Tensor]
RANK = 3
OLDER = "text_model."


@dataclass(frozen=True)
class Spelled:
    """What a program's file holds. layers: submodel and module -> what belongs to the weight."""

    tensors: Tensors
    layers: Mapping[tuple[str, str], torch.Tensor]


def states(checkpoint: Checkpoint) -> dict[str, Tensors]:
    """The weights of the submodels that LoRAs change."""
    return {
        name: load_module(name, checkpoint.submodels[name].load).state_dict() for name in checkpoint.family.with_loras
    }


def _kohya_prefix(submodel: str, with_two: bool) -> str:
    number = {"text_encoder": "1" if with_two else "", "text_encoder_2": "2"}.get(submodel)
    return "lora_unet_" if number is None else f"lora_te{number}_"


def _kohya(
    weights: Mapping[str, Tensors], dtype: torch.dtype, alpha: torch.Tensor, *, original: bool, plain: bool
) -> Spelled:
    """original: the UNet's modules by their names in the original layout. plain: no convolutions but those of 1x1."""
    tensors, layers = {}, {}
    names = _original_names(weights["unet"]) if original else {}
    for submodel, module, shape in _modules(weights, plain):
        if module == "text_projection":
            continue
        bare = module.removeprefix(OLDER)
        stem = f"{OLDER}{bare}" if submodel != "unet" else names.get(module, module)
        stem = _kohya_prefix(submodel, len(weights) > 2) + stem.replace(".", "_")
        down, up = _factors(shape, dtype)
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.alpha": alpha.clone()}
        layers[submodel, module] = _delta(down, up, float(alpha) / RANK)
    return Spelled(tensors, layers)


def kohya(weights: Mapping[str, Tensors]) -> Spelled:
    return _kohya(weights, torch.float16, torch.tensor(2.0, dtype=torch.float16), original=False, plain=True)


def kohya_locon_in_original_names(weights: Mapping[str, Tensors]) -> Spelled:
    """As it names the modules of Stable Diffusion XL, whose original UNet it trains. `--network_alpha` is whole here."""
    return _kohya(weights, torch.bfloat16, torch.tensor(1), original=True, plain=False)


def onetrainer(weights: Mapping[str, Tensors]) -> Spelled:
    return _kohya(weights, torch.float32, torch.tensor(1.5), original=False, plain=False)


def ai_toolkit(weights: Mapping[str, Tensors]) -> Spelled:
    return _kohya(weights, torch.float16, torch.tensor(RANK), original=False, plain=True)


def comfyui(weights: Mapping[str, Tensors]) -> Spelled:
    tensors, layers = {}, {}
    names = _original_names(weights["unet"])
    for submodel, module, shape in _modules({"unet": weights["unet"]}):
        stem = f"diffusion_model.{names.get(module, module)}"
        down, up = _factors(shape, torch.float16)
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
        layers[submodel, module] = _delta(down, up, 1.0)
    return Spelled(tensors, layers)


def diffusers(weights: Mapping[str, Tensors]) -> Spelled:
    """Before transformers 5; a second text encoder keeps the name of its text_model since."""
    tensors, layers = {}, {}
    for submodel, module, shape in _modules(weights):
        bare = module.removeprefix(OLDER)
        named = f"{OLDER}{bare}" if submodel != "unet" and module != "text_projection" else module
        down, up = _factors(shape, torch.float32)
        stem = f"{submodel}.{named}"
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        layers[submodel, module] = _delta(down, up, 1.0)
    return Spelled(tensors, layers)


def diffusers_now(weights: Mapping[str, Tensors]) -> Spelled:
    tensors, layers = {}, {}
    for submodel, module, shape in _modules(weights):
        down, up = _factors(shape, torch.float32)
        stem = f"{submodel}.{module}"
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        layers[submodel, module] = _delta(down, up, 1.0)
    return Spelled(tensors, layers)


def diffusers_of_2023(weights: Mapping[str, Tensors]) -> Spelled:
    tensors, layers = {}, {}
    for submodel, module, shape in _modules(weights):
        down, up = _factors(shape, torch.float32)
        if submodel == "unet":
            parent, _, last = module.removesuffix(".0").rpartition(".")
            if not parent.endswith(("attn1", "attn2")) and "to_out" not in module:
                continue
            stem, roles = f"unet.{parent}.processor.{last}_lora", (".down.weight", ".up.weight")
        elif module != "text_projection":
            stem = f"{submodel}.{OLDER}{module.removeprefix(OLDER)}.lora_linear_layer"
            roles = (".down.weight", ".up.weight")
        else:
            continue
        tensors |= {stem + roles[0]: down, stem + roles[1]: up}
        layers[submodel, module] = _delta(down, up, 1.0)
    return Spelled(tensors, layers)


SPELLINGS: dict[str, Callable[[Mapping[str, Tensors]], Spelled]] = {
    "kohya": kohya,
    "kohya, LoCon in original names": kohya_locon_in_original_names,
    "OneTrainer": onetrainer,
    "ai-toolkit": ai_toolkit,
    "ComfyUI": comfyui,
    "diffusers": diffusers,
    "diffusers with transformers 5": diffusers_now,
    "diffusers of 2023": diffusers_of_2023,
}


def _original_names(state: Tensors) -> Mapping[str, str]:
    return ldm_unet_names(key.removesuffix(".weight") for key in state if key.endswith(".weight"))


def _modules(weights: Mapping[str, Tensors], plain: bool = False) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (submodel, key.removesuffix(".weight"), tuple(weight.shape))
        for submodel, state in weights.items()
        for key, weight in state.items()
        if key.endswith(".weight") and weight.dim() in (2, 4) and "_embedding.weight" not in key
        if not plain or all(side == 1 for side in weight.shape[2:])
    ]


def _factors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    down = torch.randn((RANK, *shape[1:]), generator=generator) * 0.1
    up = torch.randn((shape[0], RANK, *(1 for _ in shape[2:])), generator=generator) * 0.1
    return down.to(dtype), up.to(dtype)


def _delta(down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """What a trainer adds to the weight, in float64."""
    product = up.double().reshape(len(up), RANK) @ down.double().reshape(RANK, -1)
    return scale * product.reshape(len(up), *down.shape[1:])
