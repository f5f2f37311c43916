"""Parameters of the other networks besides the denoiser, from their configs and without torch, to estimate graph sizes.

Unlike those of `sdflow.models.parameters`, they are not used to check files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sdflow.models.parameters import Config, Found, linear_layer, unet_parameters

_OF_NET = ("conv_in.", "time_embedding.", "add_embedding.", "down_blocks.", "mid_block.")
"""Prefixes of the UNet half that a ControlNet shares."""


def controlnet_parameters(config: Config, hint: Sequence[int]) -> Found | None:
    """Return the parameters of diffusers' ControlNetModel. hint: channels of the layers that read the control image."""
    widths, layers = config["block_out_channels"], config.get("layers_per_block", 2)
    up = [name.replace("Down", "Up") for name in reversed(config["down_block_types"])]
    whole = unet_parameters({**config, "up_block_types": up, "out_channels": config["in_channels"]})
    if whole is None or not isinstance(layers, int):
        return None
    found = {name: shape for name, shape in whole.items() if name.startswith(_OF_NET)}
    skips = [widths[0]]
    for level, width in enumerate(widths):
        skips += [width] * (layers + (level < len(widths) - 1))
    outputs = {f"controlnet_down_blocks.{index}": width for index, width in enumerate(skips)}
    for name, width in {**outputs, "controlnet_mid_block": widths[-1]}.items():
        found |= {f"{name}.weight": (width, width, 1, 1), f"{name}.bias": (width,)}
    before = config.get("conditioning_channels", 3)
    convolutions = [(hint[0], before)]
    for width, after in pairwise(hint):
        convolutions += [(width, width), (after, width)]
    for index, (out, into) in enumerate([*convolutions, (widths[0], hint[-1])]):
        name = f"controlnet_cond_embedding.{index}"
        found |= {f"{name}.weight": (out, into, 3, 3), f"{name}.bias": (out,)}
    return found


def clip_vision_parameters(config: Config, projection: int) -> Found:
    """Return the parameters of transformers' CLIPVisionModelWithProjection."""
    width, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    tokens = (config["image_size"] // patch) ** 2 + 1
    found: Found = {
        "vision_model.embeddings.class_embedding": (width,),
        "vision_model.embeddings.patch_embedding.weight": (width, config.get("num_channels", 3), patch, patch),
        "vision_model.embeddings.position_embedding.weight": (tokens, width),
    }
    for name in ("pre_layrnorm", "post_layernorm"):
        found |= {f"vision_model.{name}.weight": (width,), f"vision_model.{name}.bias": (width,)}
    for layer in range(config["num_hidden_layers"]):
        block = f"vision_model.encoder.layers.{layer}"
        for matrix in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= linear_layer(f"{block}.self_attn.{matrix}", width, width)
        found |= linear_layer(f"{block}.mlp.fc1", inner, width) | linear_layer(f"{block}.mlp.fc2", width, inner)
        for norm in ("layer_norm1", "layer_norm2"):
            found |= {f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)}
    return found | {"visual_projection.weight": (projection, width)}


def tiny_vae_parameters(config: Config, half: str) -> Found:
    """Return the parameters of one half of diffusers' AutoencoderTiny: "encoder" or "decoder"."""
    widths, counts = config[f"{half}_block_out_channels"], config[f"num_{half}_blocks"]
    ends = (config["in_channels"], config["latent_channels"])
    into, out = ends if half == "encoder" else ends[::-1]
    found: Found = {f"{half}.layers.0.weight": (widths[0], into, 3, 3), f"{half}.layers.0.bias": (widths[0],)}
    layer = 1
    for level, (width, count) in enumerate(zip(widths, counts, strict=True)):
        if half == "encoder" and level:
            found[f"{half}.layers.{layer}.weight"] = (width, width, 3, 3)
            layer += 1
        for _ in range(count):
            for index in (0, 2, 4):
                found[f"{half}.layers.{layer}.conv.{index}.weight"] = (width, width, 3, 3)
                found[f"{half}.layers.{layer}.conv.{index}.bias"] = (width,)
            layer += 1
        if half == "decoder" and level < len(widths) - 1:
            found[f"{half}.layers.{layer}.weight"] = (width, width, 3, 3)
            layer += 1
    return found | {f"{half}.layers.{layer}.weight": (out, widths[-1], 3, 3), f"{half}.layers.{layer}.bias": (out,)}
