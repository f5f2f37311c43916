"""Names of the original (Black Forest Labs) layout for the tensors of diffusers' FluxTransformer2DModel.

Layout: https://github.com/black-forest-labs/flux, src/flux/model.py and modules/layers.py. Mapping: the inverse of
`convert_flux_transformer_checkpoint_to_diffusers` in diffusers' loaders/single_file_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sdflow.models.base import Original

_SWAPPED = "norm_out.linear"
"""Scale and shift are in the opposite order in the original layout."""
_OUTER = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    _SWAPPED: "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_IN_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_IN_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
_NORMS_OF_DOUBLE = {
    "attn.norm_q": "img_attn.norm.query_norm.scale",
    "attn.norm_k": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k": "txt_attn.norm.key_norm.scale",
}
_NORMS_OF_SINGLE = {"attn.norm_q": "norm.query_norm.scale", "attn.norm_k": "norm.key_norm.scale"}
_PACKED_IN_DOUBLE = {
    **{f"attn.to_{each}": Original("img_attn.qkv", index, 3) for index, each in enumerate("qkv")},
    **{f"attn.add_{each}_proj": Original("txt_attn.qkv", index, 3) for index, each in enumerate("qkv")},
}
_PACKED_IN_SINGLE = {
    **{f"attn.to_{each}": Original("linear1", index, 7) for index, each in enumerate("qkv")},
    "proj_mlp": Original("linear1", 3, 7, taken=4),
}
"""q, k, v, and the first feed-forward layer, which is four times as high, share one matrix."""
_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")


def flux_names(keys: Iterable[str]) -> dict[str, Original]:
    """Return state_dict key -> location, without `model.diffusion_model.`. Omits keys without a counterpart."""
    names = {}
    for key in keys:
        module, _, kind = key.rpartition(".")
        if module in _OUTER:
            names[key] = Original(f"{_OUTER[module]}.{kind}", swapped=module == _SWAPPED)
        elif (found := _BLOCK.match(module)) and (place := _in_block(bool(found[1]), found[3], kind)) is not None:
            block = "single_blocks" if found[1] else "double_blocks"
            names[key] = Original(f"{block}.{found[2]}.{place.name}", place.part, place.parts, place.taken)
    return names


def _in_block(single: bool, module: str, kind: str) -> Original | None:
    norms = _NORMS_OF_SINGLE if single else _NORMS_OF_DOUBLE
    if module in norms:
        return Original(norms[module])
    whole = _IN_SINGLE if single else _IN_DOUBLE
    if module in whole:
        return Original(f"{whole[module]}.{kind}")
    packed = (_PACKED_IN_SINGLE if single else _PACKED_IN_DOUBLE).get(module)
    return None if packed is None else Original(f"{packed.name}.{kind}", packed.part, packed.parts, packed.taken)
