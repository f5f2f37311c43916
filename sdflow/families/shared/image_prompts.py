"""Image prompts (IP-Adapter): the denoiser's inputs, and diffusers' own pipelines with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdflow.models.base import Config
from sdflow.models.image_encoder import PIXELS, SHOWN
from sdflow.models.image_prompts import ADAPTED, scale_input, tokens_axis, tokens_input

if TYPE_CHECKING:
    import torch

    from sdflow.families.shared.request import Run, Tensors


@dataclass(frozen=True)
class ImagePrompt:
    """An adapter's image prompt. images: PIL images or arrays for CLIP's image processor; empty: no image prompt.
    scale: strength of its effect."""

    images: Sequence[Any] = ()
    scale: float = 1.0


def adapter_count(denoiser: Config) -> int:
    """Return the number of IP-Adapters of a denoiser with this config."""
    return len(denoiser.get(ADAPTED) or ())


def token_axes(denoiser: Config, prompts: Sequence[ImagePrompt]) -> dict[str, int]:
    """Return the sizes of the denoiser's token axes for one prompt per adapter; a prompt without images has room for
    one."""
    counts = zip(denoiser.get(ADAPTED) or (), prompts, strict=True)
    return {tokens_axis(adapter): tokens * (len(each.images) or 1) for adapter, (tokens, each) in enumerate(counts)}


def image_conditions(
    run: Run,
    submodel: str,
    processor: Any,
    denoiser: Config,
    prompts: Sequence[ImagePrompt],
    rows: int,
    *,
    guided: bool,
) -> Tensors:
    """Return the denoiser's inputs for one prompt per adapter; zeros for adapters without an image.

    submodel: the image encoder. denoiser: its config. rows: of its batch; all images get the same prompts. guided: the
    first half of the rows gets diffusers' equivalent of a negative prompt.
    """
    import torch

    found: dict[str, torch.Tensor] = {}
    for adapter, (prompt, count) in enumerate(zip(prompts, token_axes(denoiser, prompts).values(), strict=True)):
        found[scale_input(adapter)] = torch.tensor([prompt.scale if prompt.images else 0.0])
        if not prompt.images:
            found[tokens_input(adapter)] = torch.zeros(rows, count, denoiser["cross_attention_dim"])
            continue
        pixels = processor(list(prompt.images), return_tensors="pt").pixel_values
        read = torch.cat([torch.zeros_like(pixels[:1]), pixels]) if guided else pixels
        shown = torch.tensor([float(index > 0 or not guided) for index in range(len(read))])
        tokens = run(submodel, {PIXELS: read, SHOWN: shown})[tokens_input(adapter)]
        halves = [tokens[-len(pixels) :]]
        if guided:
            halves.insert(0, tokens[:1].expand(len(pixels), -1, -1))
        joined = [half.reshape(1, -1, half.shape[-1]).expand(rows // len(halves), -1, -1) for half in halves]
        found[tokens_input(adapter)] = torch.cat(joined)
    return found


def reads_layers(projection: Any) -> bool:
    """Whether a diffusers projection reads a layer's hidden states rather than the image embedding, as its pipelines
    check."""
    from diffusers.models.embeddings import ImageProjection

    return not isinstance(projection, ImageProjection)


def with_projections(pipeline: Any) -> Any:
    """Return diffusers' pipeline as after `load_ip_adapter`, if it has an image encoder: moves the projections, which
    are in the image encoder here, to the denoiser."""
    from diffusers.models.embeddings import MultiIPAdapterImageProjection

    if pipeline.image_encoder is not None and pipeline.unet is not None:
        pipeline.unet.encoder_hid_proj = MultiIPAdapterImageProjection(list(pipeline.image_encoder.image_proj))
    return pipeline
