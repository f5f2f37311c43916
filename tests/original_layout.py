"""A checkpoint's tensors as one file in the original (CompVis) layout holds them."""

from __future__ import annotations

import torch

from sdflow.sources import Checkpoint, load_module
from sdflow.sources.ldm_names import ldm_unet_names, ldm_vae_names

ATTENTION = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")


def original_layout(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """UNet, VAE and text encoder, and what such files hold besides."""
    unet, vae, text = (
        load_module(name, checkpoint.submodels[name].load).state_dict()
        for name in ("unet", "vae_decoder", "text_encoder")
    )
    tensors = {f"model.diffusion_model.{name}": unet[key] for key, name in ldm_unet_names(unet).items()}
    for key, name in ldm_vae_names(vae).items():
        tensor = vae[key][:, :, None, None] if key.endswith(ATTENTION) else vae[key]  # 1x1 convolutions there
        tensors[f"first_stage_model.{name}"] = tensor
    for key, tensor in text.items():
        tensors[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = tensor
    tensors["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    tensors["alphas_cumprod"] = torch.linspace(1, 0, 1000)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
