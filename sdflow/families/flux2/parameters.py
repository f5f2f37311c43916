"""Parameters of diffusers' Flux2Transformer2DModel from its config, without torch (`sdflow.models.parameters`)."""

from __future__ import annotations

from sdflow.models.parameters import MOST_BLOCKS, Config, Found, linear_layer


def flux2_parameters(config: Config) -> Found | None:
    """Return name -> shape, or None if the config exceeds the block limit."""
    head, doubles, singles = config["attention_head_dim"], config["num_layers"], config["num_single_layers"]
    width = head * config["num_attention_heads"]
    inner, patch = int(width * config.get("mlp_ratio", 3.0)), config.get("patch_size", 1)
    out = config.get("out_channels") or config["in_channels"]
    if doubles + singles > MOST_BLOCKS:
        return None
    time = config.get("timestep_guidance_channels", 256)
    matrices = {
        "x_embedder": (width, config["in_channels"]),
        "context_embedder": (width, config["joint_attention_dim"]),
        "double_stream_modulation_img.linear": (6 * width, width),
        "double_stream_modulation_txt.linear": (6 * width, width),
        "single_stream_modulation.linear": (3 * width, width),
        "norm_out.linear": (2 * width, width),
        "proj_out": (patch * patch * out, width),
    }
    for name in ("timestep_embedder", *(["guidance_embedder"] if config.get("guidance_embeds", True) else [])):
        matrices[f"time_guidance_embed.{name}.linear_1"] = (width, time)
        matrices[f"time_guidance_embed.{name}.linear_2"] = (width, width)
    norms = []
    square = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    for layer in range(doubles):
        block = f"transformer_blocks.{layer}"
        matrices |= {f"{block}.attn.{name}": (width, width) for name in square}
        norms += [f"{block}.attn.{name}" for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")]
        for name in ("ff", "ff_context"):
            matrices[f"{block}.{name}.linear_in"] = (2 * inner, width)
            matrices[f"{block}.{name}.linear_out"] = (width, inner)
    for layer in range(singles):
        block = f"single_transformer_blocks.{layer}.attn"
        matrices[f"{block}.to_qkv_mlp_proj"] = (3 * width + 2 * inner, width)
        matrices[f"{block}.to_out"] = (width, width + inner)
        norms += [f"{block}.{name}" for name in ("norm_q", "norm_k")]
    found: Found = {}
    for name, (rows, columns) in matrices.items():
        found |= linear_layer(name, rows, columns, bias=False)
    return found | {f"{name}.weight": (head,) for name in norms}
