"""Parameters of diffusers' FluxTransformer2DModel by its configuration, without torch (`sdflow.models.parameters`)."""

from __future__ import annotations

from sdflow.models.parameters import MOST_BLOCKS, Config, Found, linear_layer

_TIME = 256
"""Sines and cosines that the timestep becomes, and the guidance scale."""


def flux_parameters(config: Config) -> Found | None:
    """None for a configuration with more blocks than any such model has."""
    head, double, single = config["attention_head_dim"], config["num_layers"], config["num_single_layers"]
    width = head * config["num_attention_heads"]
    if max(double, single) > MOST_BLOCKS:
        return None
    embedders = {"timestep_embedder": _TIME, "text_embedder": config["pooled_projection_dim"]}
    if config.get("guidance_embeds"):
        embedders["guidance_embedder"] = _TIME
    found: Found = {}
    for name, into in embedders.items():
        found |= linear_layer(f"time_text_embed.{name}.linear_1", width, into)
        found |= linear_layer(f"time_text_embed.{name}.linear_2", width, width)
    found |= linear_layer("context_embedder", width, config["joint_attention_dim"])
    found |= linear_layer("x_embedder", width, config["in_channels"])
    for layer in range(double):
        block = f"transformer_blocks.{layer}"
        for name in ("norm1.linear", "norm1_context.linear"):
            found |= linear_layer(f"{block}.{name}", 6 * width, width)
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            found |= linear_layer(f"{block}.attn.{name}", width, width)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            found[f"{block}.attn.{name}.weight"] = (head,)
        for name in ("ff", "ff_context"):
            found |= linear_layer(f"{block}.{name}.net.0.proj", 4 * width, width)
            found |= linear_layer(f"{block}.{name}.net.2", width, 4 * width)
    for layer in range(single):
        block = f"single_transformer_blocks.{layer}"
        found |= linear_layer(f"{block}.norm.linear", 3 * width, width)
        found |= linear_layer(f"{block}.proj_mlp", 4 * width, width)
        found |= linear_layer(f"{block}.proj_out", width, 5 * width)
        for name in ("to_q", "to_k", "to_v"):
            found |= linear_layer(f"{block}.attn.{name}", width, width)
        for name in ("norm_q", "norm_k"):
            found[f"{block}.attn.{name}.weight"] = (head,)
    found |= linear_layer("norm_out.linear", 2 * width, width)
    out = config["patch_size"] ** 2 * (config.get("out_channels") or config["in_channels"])
    return found | linear_layer("proj_out", out, width)
