"""Names of the original (Stability AI, "MMDiT") layout for the tensors of diffusers' SD3Transformer2DModel.

Layout: https://github.com/Stability-AI/sd3.5, mmditx.py. Mapping: the inverse of
`convert_sd3_transformer_checkpoint_to_diffusers` in diffusers' loaders/single_file_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sdflow.models.base import Original

_OUTER = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}
_IN_BLOCK = {
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "attn2.to_out.0": "x_block.attn2.proj",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}
_PACKED = {
    **{f"attn.to_{each}": ("x_block.attn.qkv", index) for index, each in enumerate("qkv")},
    **{f"attn.add_{each}_proj": ("context_block.attn.qkv", index) for index, each in enumerate("qkv")},
    **{f"attn2.to_{each}": ("x_block.attn2.qkv", index) for index, each in enumerate("qkv")},
}
_BLOCK = re.compile(r"transformer_blocks\.(\d+)\.(.+)")


def sd3_names(keys: Iterable[str]) -> dict[str, Original]:
    """Return state_dict key -> location, without `model.diffusion_model.`. Omits keys without one.

    The modulation of the last norms has shift and scale swapped. The last block is determined from the keys, so pass
    all of them.
    """
    keys = list(keys)
    last = max((int(found[1]) for key in keys if (found := _BLOCK.match(key))), default=-1)
    names = {}
    for key in keys:
        if key in _OUTER:
            names[key] = Original(_OUTER[key])
            continue
        module, _, kind = key.rpartition(".")
        if module in _OUTER:
            names[key] = Original(f"{_OUTER[module]}.{kind}", swapped=module == "norm_out.linear")
        elif found := _BLOCK.match(module):
            block, inner = f"joint_blocks.{found[1]}", found[2]
            if inner in _PACKED:
                name, index = _PACKED[inner]
                names[key] = Original(f"{block}.{name}.{kind}", index, 3)
            elif inner in _IN_BLOCK:
                swapped = inner == "norm1_context.linear" and int(found[1]) == last
                names[key] = Original(f"{block}.{_IN_BLOCK[inner]}.{kind}", swapped=swapped)
    return names
