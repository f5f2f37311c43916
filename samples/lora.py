"""Adapters to train, and the two file formats they are kept in."""

import re
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

LAYERS = re.compile(
    r".*\.(to_q|to_k|to_v|to_out\.0|ff\.net\.0\.proj|ff\.net\.2|proj_in|proj_out"  # the UNet's transformer blocks
    r"|q_proj|k_proj|v_proj|out_proj|fc1|fc2)"  # the text encoder
)


def freeze(*modules: nn.Module) -> None:
    """Let no parameter of the modules be trained."""
    for module in modules:
        module.requires_grad_(False)


def add_lora(module: nn.Module, name: str, rank: int, alpha: float) -> None:
    """Add a LoRA of the given rank, scaled by alpha / rank, to every attention and feed-forward layer."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=LAYERS.pattern, init_lora_weights="gaussian")
    module.add_adapter(config, adapter_name=name)


def lora_parameters(name: str, *modules: nn.Module) -> list[nn.Parameter]:
    """The parameters of one adapter."""
    return [p for m in modules for key, p in m.named_parameters() if f".{name}." in key and "lora_" in key]


def _state(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    state = get_peft_model_state_dict(module, adapter_name=name)
    return {key: value.detach().half().cpu().contiguous() for key, value in state.items()}


def save_diffusers(unet: nn.Module, name: str, path: Path) -> None:
    """Write the UNet's adapter as diffusers does: keys `unet.<module>.lora_A.weight`. Its alpha must be its rank."""
    StableDiffusionPipeline.save_lora_weights(path.parent, unet_lora_layers=_state(unet, name), weight_name=path.name)


def save_kohya(unet: nn.Module, text_encoder: nn.Module, name: str, alpha: float, path: Path) -> None:
    """Write both adapters as kohya-ss/sd-scripts does: `lora_unet_<module>` with `.lora_down`, `.lora_up`, `.alpha`."""
    out: dict[str, torch.Tensor] = {}
    for prefix, module in (("lora_unet_", unet), ("lora_te_text_model_", text_encoder)):
        for key, value in _state(module, name).items():
            layer, side = re.fullmatch(r"(?:text_model\.)?(.*)\.lora_([AB])\.weight", key).groups()  # type: ignore[union-attr]
            layer = prefix + layer.replace(".", "_")
            out[f"{layer}.lora_{'down' if side == 'A' else 'up'}.weight"] = value
            out[f"{layer}.alpha"] = torch.tensor(alpha, dtype=torch.float16)
    save_file(out, path, metadata={"ss_network_module": "networks.lora", "ss_network_alpha": str(alpha)})
