"""FLUX.2's transformer in the layout of Black Forest Labs, written from diffusers' module, so that this knows nothing of sdflow's
names: https://github.com/black-forest-labs/flux2, src/flux2/model.py."""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def flux2_tensors(transformer: Any) -> Tensors:
    """Its tensors, as its published files name them."""
    time = transformer.time_guidance_embed.timestep_embedder
    places = {
        "img_in": transformer.x_embedder,
        "txt_in": transformer.context_embedder,
        "time_in.in_layer": time.linear_1,
        "time_in.out_layer": time.linear_2,
        "double_stream_modulation_img.lin": transformer.double_stream_modulation_img.linear,
        "double_stream_modulation_txt.lin": transformer.double_stream_modulation_txt.linear,
        "single_stream_modulation.lin": transformer.single_stream_modulation.linear,
        "final_layer.linear": transformer.proj_out,
    }
    scales: dict[str, Any] = {}
    found: Tensors = {}
    for index, block in enumerate(transformer.transformer_blocks):
        name, attention = f"double_blocks.{index}", block.attn
        found |= _packed(f"{name}.img_attn.qkv", attention.to_q, attention.to_k, attention.to_v)
        found |= _packed(f"{name}.txt_attn.qkv", attention.add_q_proj, attention.add_k_proj, attention.add_v_proj)
        places |= {f"{name}.img_attn.proj": attention.to_out[0], f"{name}.txt_attn.proj": attention.to_add_out}
        places |= {f"{name}.img_mlp.0": block.ff.linear_in, f"{name}.img_mlp.2": block.ff.linear_out}
        places |= {f"{name}.txt_mlp.0": block.ff_context.linear_in, f"{name}.txt_mlp.2": block.ff_context.linear_out}
        scales |= {
            f"{name}.img_attn.norm.query_norm": attention.norm_q,
            f"{name}.img_attn.norm.key_norm": attention.norm_k,
        }
        scales |= {
            f"{name}.txt_attn.norm.query_norm": attention.norm_added_q,
            f"{name}.txt_attn.norm.key_norm": attention.norm_added_k,
        }
    for index, block in enumerate(transformer.single_transformer_blocks):
        name, attention = f"single_blocks.{index}", block.attn
        places |= {f"{name}.linear1": attention.to_qkv_mlp_proj, f"{name}.linear2": attention.to_out}
        scales |= {f"{name}.norm.query_norm": attention.norm_q, f"{name}.norm.key_norm": attention.norm_k}
    scale, shift = transformer.norm_out.linear.weight.chunk(2)
    found["final_layer.adaLN_modulation.1.weight"] = torch.cat([shift, scale])
    found |= {f"{name}.weight": module.weight for name, module in places.items()}
    found |= {f"{name}.scale": module.weight for name, module in scales.items()}
    return {name: tensor.detach().contiguous() for name, tensor in found.items()}


def _packed(name: str, *layers: Any) -> Tensors:
    return {f"{name}.weight": torch.cat([layer.weight for layer in layers])}
