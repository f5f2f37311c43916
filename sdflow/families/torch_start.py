"""What diffusers' own pipelines are given to start from, so that they compute what sdflow's compute.

diffusers draws a sample of the encoder's distribution. sdflow's encoder gives the mean, as an exported one must: so
diffusers is given the mean too, by arguments that its pipelines document.
"""

from __future__ import annotations

from typing import Any


def torch_start(pipeline: Any, image: Any = None, mask_image: Any = None, **more: Any) -> dict[str, Any]:
    """Arguments of a call of a pipeline of diffusers: without an image `more` alone; those of inpainting with a mask."""
    if image is None:
        return more
    pixels = pipeline.image_processor.preprocess(image)
    if mask_image is None:
        return {"image": _mean(pipeline, pixels), **more}
    kept = pipeline.mask_processor.preprocess(mask_image) < 0.5
    return {"image": image, "mask_image": mask_image, "masked_image_latents": _mean(pipeline, pixels * kept), **more}


def _mean(pipeline: Any, pixels: Any) -> Any:
    """The mean of the latents' distribution, scaled. As in diffusers, a VAE that overflows float16 encodes in float32."""
    vae = pipeline.vae
    dtype = vae.dtype
    widened = hasattr(pipeline, "upcast_vae") and vae.config.force_upcast
    if widened:
        vae.float()
    latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode() * vae.config.scaling_factor
    if widened:
        vae.to(dtype)
    return latents.to(dtype)
