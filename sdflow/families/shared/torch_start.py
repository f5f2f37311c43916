"""Start inputs for diffusers' own pipelines, so that they compute the same as sdflow's.

diffusers samples the encoder's distribution, while sdflow's exported encoder returns the mean. So diffusers gets the
mean too, through documented arguments of its pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def torch_start(
    pipeline: Any,
    noise: torch.Tensor,
    steps: int,
    *,
    image: Any = None,
    mask_image: Any = None,
    strength: float | None = None,
    pack: Callable[[torch.Tensor], torch.Tensor] = lambda latents: latents,
    scale: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of a diffusers pipeline call that starts from this noise, (images, channels, rows, columns),
    and the inputs from `sdflow.samples.canvas`. pack: converts latents to the form the call takes (`Family.packed`).
    scale: pixels per latent pixel; default: the pipeline's."""
    height, width = ((pipeline.vae_scale_factor if scale is None else scale) * size for size in noise.shape[2:])
    if image is None:
        return {"latents": pack(noise), "height": height, "width": width}
    given = {"strength": strength}
    pixels = pipeline.image_processor.preprocess(image)
    if mask_image is not None:
        kept = pipeline.mask_processor.preprocess(mask_image) < 0.5
        masked = _mean(pipeline, pixels * kept)
        given |= {"image": image, "mask_image": mask_image, "masked_image_latents": masked}
        return {**given, "latents": pack(noise), "height": height, "width": width}
    mean = _mean(pipeline, pixels).repeat(len(noise), 1, 1, 1)
    pipeline.scheduler.set_timesteps(steps)
    first = pipeline.scheduler.timesteps[:1]
    return {**given, "image": mean, "latents": pipeline.scheduler.add_noise(mean, noise.to(mean), first)}


def _mean(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return the scaled mean of the latent distribution. As in diffusers, a VAE that overflows float16 encodes in
    float32."""
    vae = pipeline.vae
    dtype = vae.dtype
    widened = hasattr(pipeline, "upcast_vae") and vae.config.force_upcast
    if widened:
        vae.float()
    encoded = vae.encode(pixels.to(vae.device, vae.dtype))
    latents: torch.Tensor = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
    if widened:
        vae.to(dtype)
    return (latents * vae.config.scaling_factor).to(dtype)
