"""Z-Image's transformer in the original layout, written here by hand from what diffusers' converter reads."""

from __future__ import annotations

from typing import Any

import torch

RENAMED = {"all_final_layer.2-1": "final_layer", "all_x_embedder.2-1": "x_embedder"}
IN_ATTENTION = {"norm_q": "q_norm", "norm_k": "k_norm", "to_out.0": "out"}


def z_image_tensors(transformer: Any) -> dict[str, torch.Tensor]:
    """Its tensors by Tongyi's names: q, k and v of an attention are rows of one matrix."""
    state = dict(transformer.state_dict())
    for name in [name for name in state if name.endswith(".attention.to_q.weight")]:
        block = name.removesuffix(".to_q.weight")
        parts = [state.pop(f"{block}.to_{each}.weight") for each in "qkv"]
        state[f"{block}.qkv.weight"] = torch.cat(parts)
    found = {}
    for name, tensor in state.items():
        for now, before in RENAMED.items():
            name = name.replace(f"{now}.", f"{before}.")
        for now, before in IN_ATTENTION.items():
            name = name.replace(f".attention.{now}.", f".attention.{before}.")
        found[name] = tensor
    return found
