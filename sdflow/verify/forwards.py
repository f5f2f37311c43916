"""What each submodel gives, under the names of `sdflow.passes.submodel_io`, from the module's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sdflow.verify.cases import Cases, Kind

if TYPE_CHECKING:
    import numpy as np

TOGETHER = 2**15
"""Numbers in the first input of a run that several cases share: two latents of 64x64, or 32 of 16x16."""
Forward = Callable[..., dict[str, Any]]
"""A module and its inputs to its outputs by name, torch tensors."""


def _text_forward(module: Any, input_ids: Any) -> dict[str, Any]:
    output = module(input_ids=input_ids.long())
    return {"last_hidden_state": output.last_hidden_state, "pooler_output": output.pooler_output}


def _unet_forward(module: Any, sample: Any, timestep: Any, encoder_hidden_states: Any) -> dict[str, Any]:
    return {"out_sample": module(sample, timestep, encoder_hidden_states=encoder_hidden_states).sample}


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


def run_cases(cases: Cases, kind: Kind, module: Any, forward: Forward) -> None:
    """Put the outputs of every case that has none of this kind yet. kind: "float32" or "float16", as the module is.

    Cases of one shape are rows of one batch, up to TOGETHER: a run of a few latents takes as long as reading the
    module's weights does, however many rows there are.
    """
    import numpy as np
    import torch

    dtype = torch.float16 if kind == "float16" else torch.float32
    for chosen in _batches(cases, kind):
        rows = [_rows(cases.get(index, "inputs")) for index in chosen]
        joined = {name: torch.from_numpy(np.concatenate([each[name] for each in rows])) for name in rows[0]}
        inputs = {
            name: value.to(dtype) if value.dtype == torch.float32 and name != "timestep" else value
            for name, value in joined.items()
        }
        outputs = {name: value.numpy() for name, value in forward(module, **inputs).items()}
        start = 0
        for index, each in zip(chosen, rows, strict=True):
            end = start + _size(each)
            cases.put(index, kind, {name: value[start:end].copy() for name, value in outputs.items()})
            start = end


def _batches(cases: Cases, kind: Kind) -> Iterator[list[int]]:
    """Indices of the cases without outputs of this kind, those that one run takes together."""
    alike: dict[Any, list[int]] = {}
    for index, _ in cases:
        if not cases.get(index, kind):  # else recorded while drawing
            inputs = _rows(cases.get(index, "inputs"))
            alike.setdefault(tuple((name, value.shape[1:]) for name, value in inputs.items()), []).append(index)
    for indices in alike.values():
        chosen: list[int] = []
        numbers = 0
        for index in indices:
            size = next(iter(cases.get(index, "inputs").values())).size
            if chosen and numbers + size > TOGETHER:
                yield chosen
                chosen, numbers = [], 0
            chosen.append(index)
            numbers += size
        yield chosen


def _rows(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs with a timestep for each row of the batch, where there is one for all."""
    size = _size(inputs)
    return {name: value.repeat(size) if name == "timestep" else value for name, value in inputs.items()}


def _size(inputs: Mapping[str, np.ndarray]) -> int:
    """Rows of the batch: of the first input, which is never the timestep."""
    return len(next(iter(inputs.values())))
