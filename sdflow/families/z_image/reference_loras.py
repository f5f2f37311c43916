"""Convert LoRA files to diffusers' names, for the reference.

diffusers reads its own, PEFT's and kohya's names, but not fused q, k and v in the original layout. Its checkpoint
converter splits these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdflow.families.shared.reference_loras import add_factors

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_FUSED = re.compile(
    r"(?:diffusion_model\.|lora_unet_|lora_transformer_|transformer\.|base_model\.model\.)?"
    r"(?P<kind>layers|noise_refiner|context_refiner)[._](?P<block>\d+)[._]attention[._]qkv"
    r"\.(?P<factor>lora_down|lora_up|lora_A|lora_B)\.weight"
)
_PEFT, _OTHER_KOHYA = "base_model.model.", "lora_transformer_"


def in_diffusers_names(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, int]:
    """Return the factors, and the number of the file's layers they cover. tensors: without alphas, already in the
    factors."""
    import diffusers

    fused = {name: match for name in tensors if (match := _FUSED.fullmatch(name))}
    rest = {_plain(name): each for name, each in tensors.items() if name not in fused}
    found: Tensors = diffusers.ZImagePipeline.lora_state_dict(rest) if rest else {}
    layers = len(found) // 2
    for name, match in fused.items():
        if match["factor"] not in ("lora_down", "lora_A"):
            continue
        down, up = tensors[name], tensors[name.replace("lora_down", "lora_up").replace("lora_A", "lora_B")]
        block = f"{match['kind']}.{match['block']}.attention"
        layers += 1
        for weight, rows in _converted(f"{block}.qkv.weight", up).items():
            add_factors(found, weight, down, rows, f"{block}.qkv")
    return found, layers


def _plain(name: str) -> str:
    """Return the name with a prefix that diffusers' converter supports."""
    if name.startswith(_PEFT):
        return "transformer." + name.removeprefix(_PEFT)
    return "lora_unet_" + name.removeprefix(_OTHER_KOHYA) if name.startswith(_OTHER_KOHYA) else name


def _converted(name: str, tensor: torch.Tensor) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers

    converted: Tensors = convert_z_image_transformer_checkpoint_to_diffusers({name: tensor})
    return converted
