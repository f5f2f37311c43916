"""Names of Black Forest Labs' layout for modules and tensors of diffusers' Flux2Transformer2DModel.

Layout: https://github.com/black-forest-labs/flux2, src/flux2/model.py. Mapping: the inverse of diffusers'
`convert_flux2_transformer_checkpoint_to_diffusers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sdflow.models.base import Original

_OUTER = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_DOUBLE = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.to_out.0": "img_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "attn.to_add_out": "txt_attn.proj",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_SINGLE = {
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
}
_FUSED = {
    **{f"attn.{name}": ("img_attn.qkv", part) for part, name in enumerate(("to_q", "to_k", "to_v"))},
    **{f"attn.{name}": ("txt_attn.qkv", part) for part, name in enumerate(("add_q_proj", "add_k_proj", "add_v_proj"))},
}
_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")


def flux2_names(keys: Iterable[str]) -> dict[str, Original]:
    """Return the location of each transformer tensor in a file of the original layout. Omits names without one."""
    return {key: found for key in keys if (found := _place(key)) is not None}


def _place(key: str) -> Original | None:
    module, _, end = key.rpartition(".")
    if module in _OUTER:
        return Original(f"{_OUTER[module]}.{end}", swapped=module == "norm_out.linear")
    if (match := _BLOCK.fullmatch(module)) is None:
        return None
    single, index, inner = match.groups()
    block = f"{'single' if single else 'double'}_blocks.{index}"
    if not single and inner in _FUSED:
        name, part = _FUSED[inner]
        return Original(f"{block}.{name}.{end}", part=part, parts=3)
    name = (_SINGLE if single else _DOUBLE).get(inner, "")
    return Original(f"{block}.{name}.{'scale' if 'norm' in name else end}") if name else None
