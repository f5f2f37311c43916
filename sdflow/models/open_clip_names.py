"""OpenCLIP names for the tensors of transformers' CLIP text encoders.

Used by files of Stable Diffusion 2.x (prefix `cond_stage_model.model.`) and SDXL's second text encoder (prefix
`conditioner.embedders.1.model.`). Layout: https://github.com/mlfoundations/open_clip, open_clip/transformer.py; q, k
and v share one matrix, as in torch.nn.MultiheadAttention. Mapping: the inverse of `convert_open_clip_checkpoint` in
diffusers' loaders/single_file_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sdflow.models.base import Original

_OUTER = {
    "embeddings.token_embedding.weight": Original("token_embedding.weight"),
    "embeddings.position_embedding.weight": Original("positional_embedding"),
    "final_layer_norm.weight": Original("ln_final.weight"),
    "final_layer_norm.bias": Original("ln_final.bias"),
    # OpenCLIP multiplies by this parameter from the right; transformers has a Linear.
    "text_projection.weight": Original("text_projection", transposed=True),
}
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_IN_LAYER = {
    "layer_norm1": "ln_1.",
    "layer_norm2": "ln_2.",
    "mlp.fc1": "mlp.c_fc.",
    "mlp.fc2": "mlp.c_proj.",
    "self_attn.out_proj": "attn.out_proj.",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def open_clip_names(keys: Iterable[str]) -> dict[str, Original]:
    """Return the OpenCLIP location of each parameter of a CLIPTextModel or CLIPTextModelWithProjection, without prefix.

    keys: with or without `text_model.`. Omits keys without a location.
    """
    return {key: found for key in keys if (found := _place(key.removeprefix("text_model.")))}


def open_clip_unused(name: str, keys: Iterable[str]) -> bool:
    """Whether tensor `name` (without prefix) is a known leftover for a module with these keys.

    Leftovers are CLIP's contrastive head and the mask. A module without a projection stops one layer early, as in
    Stable Diffusion 2.x; its file then has one more layer and a projection.
    """
    if name in ("logit_scale", "logit_bias", "attn_mask"):
        return True
    keys = [key.removeprefix("text_model.") for key in keys]
    if "text_projection.weight" in keys:
        return False
    first = "encoder.layers.0."
    layers = {match[1] for key in keys if (match := _LAYER.fullmatch(key))}
    beyond = [f"encoder.layers.{len(layers)}.{key.removeprefix(first)}" for key in keys if key.startswith(first)]
    return name == "text_projection" or name in {place.name for place in open_clip_names(beyond).values()}


def _place(key: str) -> Original | None:
    match = _LAYER.fullmatch(key)
    if match is None:
        return _OUTER.get(key)
    layer, module, kind = match.groups()
    block = f"transformer.resblocks.{layer}."
    if module in _QKV:
        return Original(f"{block}attn.in_proj_{kind}", part=_QKV.index(module), parts=len(_QKV))
    return Original(f"{block}{_IN_LAYER[module]}{kind}") if module in _IN_LAYER else None
