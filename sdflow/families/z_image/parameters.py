"""Parameters of diffusers' ZImageTransformer2DModel by its configuration, without torch (`sdflow.models.parameters`)."""

from __future__ import annotations

from sdflow.models.parameters import MOST_BLOCKS, Config, Found, linear_layer

TIME = 256
"""Most features of the embedded timestep (`ADALN_EMBED_DIM` in diffusers)."""
_SINES, _INNER_TIME = 256, 1024


def z_image_parameters(config: Config) -> Found | None:
    """None for an omni model, which reads further images."""
    width, text, patch = config["dim"], config["cap_feat_dim"], config["all_patch_size"]
    layers, refiners, time = config["n_layers"], config["n_refiner_layers"], min(config["dim"], TIME)
    if list(patch) != [2] or config.get("siglip_feat_dim") is not None or layers + refiners > MOST_BLOCKS:
        return None
    packed = 4 * config["in_channels"]
    found: Found = {"x_pad_token": (1, width), "cap_pad_token": (1, width), "cap_embedder.0.weight": (text,)}
    found |= linear_layer("all_x_embedder.2-1", width, packed)
    found |= linear_layer("all_final_layer.2-1.linear", packed, width)
    found |= linear_layer("all_final_layer.2-1.adaLN_modulation.1", width, time)
    found |= linear_layer("cap_embedder.1", width, text)
    found |= linear_layer("t_embedder.mlp.0", _INNER_TIME, _SINES)
    found |= linear_layer("t_embedder.mlp.2", time, _INNER_TIME)
    head, inner = width // config["n_heads"], int(width / 3 * 8)
    for kind, count in (("noise_refiner", refiners), ("context_refiner", refiners), ("layers", layers)):
        for index in range(count):
            block = f"{kind}.{index}"
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                found[f"{block}.attention.{name}.weight"] = (width, width)
            for name in ("norm_q", "norm_k") if config["qk_norm"] else ():
                found[f"{block}.attention.{name}.weight"] = (head,)
            found |= {f"{block}.feed_forward.{name}.weight": (inner, width) for name in ("w1", "w3")}
            found[f"{block}.feed_forward.w2.weight"] = (width, inner)
            for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
                found[f"{block}.{name}.weight"] = (width,)
            if kind != "context_refiner":
                found |= linear_layer(f"{block}.adaLN_modulation.0", 4 * width, time)
    return found
