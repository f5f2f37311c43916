"""Names of the original layout (CompVis, "LDM" or "SGM") for modules and tensors of diffusers' UNet and VAE.

Layout: https://github.com/CompVis/stable-diffusion, ldm/modules/diffusionmodules/openaimodel.py and model.py.
Mapping: the inverse of diffusers' scripts/convert_original_stable_diffusion_to_diffusers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNET_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "time_embedding.cond_proj": "time_embedding.cond_proj",  # not renamed by diffusers' conversion
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")


def ldm_unet_names(names: Iterable[str]) -> dict[str, str]:
    """Return the original name (without `model.diffusion_model.`) of each module or tensor of an SD 1.x, 2.x or XL
    UNet.

    Omits names without one. Layers per block are counted from `names`, so pass all of them.
    """
    names = list(names)
    layers = len({match[4] for name in names if (match := _BLOCK.match(name)) and match[2] == "0" and _is_down(match)})
    with_attention = {
        match[2] for name in names if (match := _BLOCK.match(name)) and match[1] == "up" and match[3] == "attentions"
    }
    return {name: found for name in names if (found := _unet_name(name, layers, with_attention))}


def _is_down(match: re.Match[str]) -> bool:
    return match[1] == "down" and match[3] == "resnets"


def _unet_name(name: str, layers: int, with_attention: set[str]) -> str | None:
    match = _BLOCK.match(name)
    if match is None:
        for ours, theirs in _UNET_OUTER.items():
            if name == ours or name.startswith(ours + "."):
                rest = name[len(ours) :]
                return theirs + (_replaced(rest, _UNET_RESNET) if "resnets" in ours else rest)
        return None
    direction, kind, rest = match[1], match[3], match[5]
    block, layer = int(match[2]), int(match[4])
    place = f"input_blocks.{block * (layers + 1) + layer + 1}"
    if direction == "up":
        place = f"output_blocks.{block * (layers + 1) + layer}"
    if kind == "resnets":
        return f"{place}.0{_replaced('.' + rest, _UNET_RESNET)}"
    if kind == "attentions":
        return f"{place}.1.{rest}"
    if kind == "downsamplers":  # the last of the block's `layers` + 1 places
        return f"input_blocks.{(block + 1) * (layers + 1)}.0{_replaced('.' + rest, {'conv': 'op'})}"
    return f"output_blocks.{block * (layers + 1) + layers}.{2 if match[2] in with_attention else 1}.{rest}"


def ldm_vae_names(names: Iterable[str]) -> dict[str, str]:
    """Return the original name (without `first_stage_model.`) of each tensor of an AutoencoderKL."""
    names = list(names)
    levels = 1 + max(
        (int(match[1]) for name in names if (match := re.match(r"decoder\.up_blocks\.(\d+)\.", name))), default=0
    )
    return {name: _vae_name(name, levels) for name in names}


def _vae_name(name: str, levels: int) -> str:
    name = re.sub(
        r"_blocks\.(\d+)\.(resnets|downsamplers\.0|upsamplers\.0)\.",
        lambda match: f".{match[1]}.{ {'r': 'block', 'd': 'downsample', 'u': 'upsample'}[match[2][0]] }.",
        name,
    )
    name = re.sub(r"^decoder\.up\.(\d+)\.", lambda match: f"decoder.up.{levels - 1 - int(match[1])}.", name)
    name = re.sub(r"mid_block\.resnets\.(\d+)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    head, attention, rest = name.partition("mid_block.attentions.0")
    if attention:
        return f"{head}mid.attn_1{_replaced(rest, _VAE_ATTENTION)}"
    return name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")


def _replaced(rest: str, names: dict[str, str]) -> str:
    """Replace the first name in a string like `.conv1.weight`."""
    for ours, theirs in names.items():
        if rest == f".{ours}" or rest.startswith(f".{ours}."):
            return f".{theirs}{rest[len(ours) + 1 :]}"
    return rest
