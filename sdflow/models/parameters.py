"""Parameters (state_dict names and shapes) of networks from their configs, without torch.

They allow checking a file's header before anything is built. They cover the architectures of Stable Diffusion 1.x, 2.x
and XL; for other configs the functions return None, and the file is checked when it is loaded.
`tests/models/test_parameters.py` compares them with the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
Found = dict[str, tuple[int, ...]]

_PLAIN_UNET: Config = {
    "attention_type": "default",
    "class_embed_type": None,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_norm": None,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "mid_block_only_cross_attention": None,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "num_class_embeds": None,
    "only_cross_attention": False,
    "projection_class_embeddings_input_dim": None,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "reverse_transformer_layers_per_block": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
    "addition_embed_type": None,
}
"""Config entries that change the architecture, with the supported values (the class's defaults)."""
_TEXT_TIME = ("addition_embed_type", "projection_class_embeddings_input_dim")
_UNET_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D")
_VAE_BLOCKS = ("DownEncoderBlock2D", "UpDecoderBlock2D")
MOST_BLOCKS = 2_000
"""Limit on a config's number of transformer or VAE blocks; the largest of these networks have about 140."""


def linear_layer(name: str, out: int, into: int, bias: bool = True) -> Found:
    """Return the parameters of a linear layer."""
    return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if bias else {})}


def _conv(name: str, out: int, into: int, kernel: int = 3) -> Found:
    return {f"{name}.weight": (out, into, kernel, kernel), f"{name}.bias": (out,)}


def _norm(name: str, size: int) -> Found:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _resnet(name: str, into: int, out: int, time: int | None) -> Found:
    found = _norm(f"{name}.norm1", into) | _conv(f"{name}.conv1", out, into)
    found |= _norm(f"{name}.norm2", out) | _conv(f"{name}.conv2", out, out)
    if time is not None:
        found |= linear_layer(f"{name}.time_emb_proj", out, time)
    return found if into == out else found | _conv(f"{name}.conv_shortcut", out, into, 1)


def _transformer(name: str, width: int, layers: int, text: int, linear: bool) -> Found:
    found = _norm(f"{name}.norm", width)
    for end in ("proj_in", "proj_out"):
        found |= linear_layer(f"{name}.{end}", width, width) if linear else _conv(f"{name}.{end}", width, width, 1)
    for layer in range(layers):
        block = f"{name}.transformer_blocks.{layer}"
        for attention, read in (("attn1", width), ("attn2", text)):
            found |= linear_layer(f"{block}.{attention}.to_q", width, width, bias=False)
            found |= linear_layer(f"{block}.{attention}.to_k", width, read, bias=False)
            found |= linear_layer(f"{block}.{attention}.to_v", width, read, bias=False)
            found |= linear_layer(f"{block}.{attention}.to_out.0", width, width)
        for norm in ("norm1", "norm2", "norm3"):
            found |= _norm(f"{block}.{norm}", width)
        found |= linear_layer(f"{block}.ff.net.0.proj", 8 * width, width) | linear_layer(
            f"{block}.ff.net.2", width, 4 * width
        )
    return found


def unet_parameters(config: Config) -> Found | None:
    """Return the parameters of diffusers' UNet2DConditionModel, or None if the config is not covered."""
    channels, down, up = config["block_out_channels"], config["down_block_types"], config["up_block_types"]
    layers, text = config.get("layers_per_block", 2), config["cross_attention_dim"]
    deep = config.get("transformer_layers_per_block", 1)
    depths = [deep] * len(channels) if isinstance(deep, int) else list(deep)
    text_time = config.get("addition_embed_type") == "text_time"
    odd = [
        name
        for name, value in _PLAIN_UNET.items()
        if config.get(name, value) != value and not (text_time and name in _TEXT_TIME)
    ]
    heads = config.get("num_attention_heads") or config.get("attention_head_dim", 8)
    per_level = [heads] * len(channels) if isinstance(heads, int) else list(heads)
    if (
        odd
        or not isinstance(layers, int)
        or not isinstance(text, int)
        or not all(isinstance(each, int) for each in depths)
    ):
        return None
    if not {*down, *up} <= {*_UNET_BLOCKS} or len({len(channels), len(down), len(up), len(depths), len(per_level)}) > 1:
        return None
    if 2 * (layers + 1) * sum(depths) > MOST_BLOCKS or any(
        width % heads for width, heads in zip(channels, per_level, strict=True)
    ):
        return None
    first, last, time = channels[0], channels[-1], 4 * channels[0]
    linear = bool(config.get("use_linear_projection", False))
    found = _conv("conv_in", first, config["in_channels"])
    found |= linear_layer("time_embedding.linear_1", time, first) | linear_layer("time_embedding.linear_2", time, time)
    if guidance := config.get("time_cond_proj_dim"):
        found |= linear_layer("time_embedding.cond_proj", first, guidance, bias=False)
    if text_time:
        found |= linear_layer("add_embedding.linear_1", time, config["projection_class_embeddings_input_dim"])
        found |= linear_layer("add_embedding.linear_2", time, time)
    before = first
    for level, width in enumerate(channels):
        block = f"down_blocks.{level}"
        for layer in range(layers):
            found |= _resnet(f"{block}.resnets.{layer}", before if layer == 0 else width, width, time)
            if down[level].startswith("CrossAttn"):
                found |= _transformer(f"{block}.attentions.{layer}", width, depths[level], text, linear)
        if level < len(channels) - 1:
            found |= _conv(f"{block}.downsamplers.0.conv", width, width)
        before = width
    for layer in range(2):
        found |= _resnet(f"mid_block.resnets.{layer}", last, last, time)
    found |= _transformer("mid_block.attentions.0", last, depths[-1], text, linear)
    for level, width in enumerate(reversed(channels)):
        block, skipped = f"up_blocks.{level}", [*reversed(channels), first][min(level + 1, len(channels) - 1)]
        for layer in range(layers + 1):
            into = (before if layer == 0 else width) + (skipped if layer == layers else width)
            found |= _resnet(f"{block}.resnets.{layer}", into, width, time)
            if up[level].startswith("CrossAttn"):
                found |= _transformer(f"{block}.attentions.{layer}", width, depths[-1 - level], text, linear)
        if level < len(channels) - 1:
            found |= _conv(f"{block}.upsamplers.0.conv", width, width)
        before = width
    return found | _norm("conv_norm_out", first) | _conv("conv_out", config["out_channels"], first)


def vae_parameters(config: Config) -> Found | None:
    """Return the parameters of diffusers' AutoencoderKL, or None if the config is not covered."""
    channels, latent, layers = (
        config["block_out_channels"],
        config["latent_channels"],
        config.get("layers_per_block", 1),
    )
    if not {*config["down_block_types"], *config["up_block_types"]} <= {*_VAE_BLOCKS}:
        return None
    if not config.get("mid_block_add_attention", True) or not isinstance(layers, int):
        return None
    if 2 * (layers + 1) * len(channels) > MOST_BLOCKS:
        return None
    found: Found = {}
    if config.get("use_quant_conv", True):
        found |= _conv("quant_conv", 2 * latent, 2 * latent, 1)
    if config.get("use_post_quant_conv", True):
        found |= _conv("post_quant_conv", latent, latent, 1)
    ends = ("encoder", "down", layers, channels, config["in_channels"], 2 * latent)
    other = ("decoder", "up", layers + 1, channels[::-1], latent, config["out_channels"])
    for half, way, count, widths, into, out in (ends, other):
        middle, before = channels[-1], widths[0]
        found |= _conv(f"{half}.conv_in", before, into)
        for level, width in enumerate(widths):
            block = f"{half}.{way}_blocks.{level}"
            for layer in range(count):
                found |= _resnet(f"{block}.resnets.{layer}", before if layer == 0 else width, width, None)
            if level < len(widths) - 1:
                found |= _conv(f"{block}.{way}samplers.0.conv", width, width)
            before = width
        for layer in range(2):
            found |= _resnet(f"{half}.mid_block.resnets.{layer}", middle, middle, None)
        found |= _norm(f"{half}.mid_block.attentions.0.group_norm", middle)
        for matrix in ("to_q", "to_k", "to_v", "to_out.0"):
            found |= linear_layer(f"{half}.mid_block.attentions.0.{matrix}", middle, middle)
        found |= _norm(f"{half}.conv_norm_out", before) | _conv(f"{half}.conv_out", out, before)
    return found


def clip_text_parameters(config: Config, prefix: str) -> Found:
    """Return the parameters of transformers' CLIPTextModel. prefix: "text_model." in the variant with a projection."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    found: Found = {
        f"{prefix}embeddings.token_embedding.weight": (config["vocab_size"], width),
        f"{prefix}embeddings.position_embedding.weight": (config["max_position_embeddings"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        block = f"{prefix}encoder.layers.{layer}"
        for matrix in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= linear_layer(f"{block}.self_attn.{matrix}", width, width)
        found |= _norm(f"{block}.layer_norm1", width) | _norm(f"{block}.layer_norm2", width)
        found |= linear_layer(f"{block}.mlp.fc1", inner, width) | linear_layer(f"{block}.mlp.fc2", width, inner)
    return found | _norm(f"{prefix}final_layer_norm", width)
