"""Parameters of Stable Diffusion 3's transformer and T5's encoder from their configs, without torch
(`sdflow.models.parameters`)."""

from __future__ import annotations

from sdflow.models.parameters import MOST_BLOCKS, Config, Found, linear_layer

_TIME = 256
"""Width of the sinusoidal timestep embedding."""


def sd3_parameters(config: Config) -> Found | None:
    """Return the parameters of diffusers' SD3Transformer2DModel."""
    head, patch, layers = config["attention_head_dim"], config["patch_size"], config["num_layers"]
    width, text, norm = head * config["num_attention_heads"], config["caption_projection_dim"], config.get("qk_norm")
    if norm not in (None, "rms_norm") or text != width or layers > MOST_BLOCKS:
        return None
    found: Found = {
        "pos_embed.pos_embed": (1, config["pos_embed_max_size"] ** 2, width),
        "pos_embed.proj.weight": (width, config["in_channels"], patch, patch),
        "pos_embed.proj.bias": (width,),
    }
    for name, into in (("timestep_embedder", _TIME), ("text_embedder", config["pooled_projection_dim"])):
        found |= linear_layer(f"time_text_embed.{name}.linear_1", width, into)
        found |= linear_layer(f"time_text_embed.{name}.linear_2", width, width)
    found |= linear_layer("context_embedder", width, config["joint_attention_dim"])
    for layer in range(layers):
        block, dual, last = f"transformer_blocks.{layer}", layer in config["dual_attention_layers"], layer == layers - 1
        found |= linear_layer(f"{block}.norm1.linear", (9 if dual else 6) * width, width)
        found |= linear_layer(f"{block}.norm1_context.linear", (2 if last else 6) * width, width)
        matrices = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
        matrices += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", *([] if last else ["attn.to_add_out"])]
        norms = ["attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"]
        if dual:
            matrices += ["attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0"]
            norms += ["attn2.norm_q", "attn2.norm_k"]
        for name in matrices:
            found |= linear_layer(f"{block}.{name}", width, width)
        for name in norms if norm else []:
            found[f"{block}.{name}.weight"] = (head,)
        for name in ("ff", *([] if last else ["ff_context"])):
            found |= linear_layer(f"{block}.{name}.net.0.proj", 4 * width, width)
            found |= linear_layer(f"{block}.{name}.net.2", width, 4 * width)
    found |= linear_layer("norm_out.linear", 2 * width, width)
    return found | linear_layer("proj_out", patch * patch * config["out_channels"], width)


def t5_parameters(config: Config) -> Found | None:
    """Return the parameters of transformers' T5EncoderModel."""
    width, inner, heads, layers = config["d_model"], config["d_ff"], config["num_heads"], config["num_layers"]
    if layers > MOST_BLOCKS:
        return None
    across = heads * config["d_kv"]
    found: Found = dict.fromkeys(("shared.weight", "encoder.embed_tokens.weight"), (config["vocab_size"], width))
    gated = config.get("is_gated_act", config.get("feed_forward_proj", "relu").startswith("gated-"))
    into = ("wi_0", "wi_1") if gated else ("wi",)
    for layer in range(layers):
        block = f"encoder.block.{layer}.layer"
        for name in ("q", "k", "v"):
            found[f"{block}.0.SelfAttention.{name}.weight"] = (across, width)
        found[f"{block}.0.SelfAttention.o.weight"] = (width, across)
        if layer == 0:
            buckets = config.get("relative_attention_num_buckets", 32)
            found[f"{block}.0.SelfAttention.relative_attention_bias.weight"] = (buckets, heads)
        for name in into:
            found[f"{block}.1.DenseReluDense.{name}.weight"] = (inner, width)
        found[f"{block}.1.DenseReluDense.wo.weight"] = (width, inner)
        found |= {f"{block}.{index}.layer_norm.weight": (width,) for index in range(2)}
    return found | {"encoder.final_layer_norm.weight": (width,)}
