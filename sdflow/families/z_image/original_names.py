"""Names of the original layout for the tensors of diffusers' ZImageTransformer2DModel.

Mapping: the inverse of `convert_z_image_transformer_checkpoint_to_diffusers` in diffusers'
loaders/single_file_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sdflow.models.base import Original

_RENAMED = (
    ("all_final_layer.2-1.", "final_layer."),
    ("all_x_embedder.2-1.", "x_embedder."),
    (".attention.to_out.0.", ".attention.out."),
    (".attention.norm_q.", ".attention.q_norm."),
    (".attention.norm_k.", ".attention.k_norm."),
)
_PACKED = re.compile(r"(.*\.attention)\.to_([qkv])\.(.+)")


def z_image_names(keys: Iterable[str]) -> dict[str, Original]:
    """Return state_dict key -> location in the original layout, without `model.diffusion_model.`. Queries, keys and
    values share one tensor there."""
    names = {}
    for key in keys:
        if packed := _PACKED.fullmatch(key):
            names[key] = Original(f"{packed[1]}.qkv.{packed[3]}", "qkv".index(packed[2]), 3)
            continue
        name = key
        for now, before in _RENAMED:
            name = name.replace(now, before)
        names[key] = Original(name)
    return names
