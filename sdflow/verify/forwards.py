"""What each submodel gives, under the names of `sdflow.passes.submodel_io`, from the module's own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Forward = Callable[..., dict[str, Any]]
"""A module and its inputs to its outputs by name, torch tensors."""


def _text_forward(module: Any, input_ids: Any) -> dict[str, Any]:
    output = module(input_ids=input_ids.long())
    return {"last_hidden_state": output.last_hidden_state, "pooler_output": output.pooler_output}


def _unet_forward(module: Any, sample: Any, timestep: Any, encoder_hidden_states: Any) -> dict[str, Any]:
    return {"out_sample": module(sample, timestep[0], encoder_hidden_states=encoder_hidden_states).sample}


def _decoder_forward(module: Any, latent_sample: Any) -> dict[str, Any]:
    return {"sample": module.decode(latent_sample).sample}


def _encoder_forward(module: Any, sample: Any) -> dict[str, Any]:
    return {"latent_sample": module.encode(sample).latent_dist.mode()}


def _checker_forward(module: Any, clip_input: Any, images: Any) -> dict[str, Any]:
    """The flags of diffusers' StableDiffusionSafetyChecker.forward_onnx, with the scores that they come from."""
    import torch
    from diffusers.pipelines.stable_diffusion.safety_checker import cosine_distance

    embeds = module.visual_projection(module.vision_model(clip_input)[1])
    special = cosine_distance(embeds, module.special_care_embeds) - module.special_care_embeds_weights
    adjustment = torch.any(special > 0, dim=1, keepdim=True) * 0.01
    scores = cosine_distance(embeds, module.concept_embeds) - module.concept_embeds_weights + adjustment
    flagged = torch.any(scores > 0, dim=1)
    blackened = torch.where(flagged[:, None, None, None], torch.zeros_like(images), images)
    return {"out_images": blackened, "has_nsfw_concepts": flagged, "scores": scores}


FORWARD: Mapping[str, Forward] = {
    "text_encoder": _text_forward,
    "unet": _unet_forward,
    "vae_decoder": _decoder_forward,
    "vae_encoder": _encoder_forward,
    "safety_checker": _checker_forward,
}
