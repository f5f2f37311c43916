"""How the configs of a UNet and a VAE bound the sizes of pictures. The arguments are what diffusers' config.json holds.

Raises KeyError for a config that does not say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vae_scale(vae: Mapping[str, Any]) -> int:
    """Image pixels per latent pixel, along each axis."""
    return halved(vae)


def latent_multiple(unet: Mapping[str, Any]) -> int:
    """Height and width of the latents must be multiples of this: PyTorch's UNet also takes sizes that do not halve evenly, a
    traced graph doubles whatever it has halved."""
    return halved(unet)


def granularity(unet: Mapping[str, Any], vae: Mapping[str, Any]) -> int:
    """Height and width of a picture in pixels must be multiples of this."""
    return vae_scale(vae) * latent_multiple(unet)


def halved(config: Mapping[str, Any]) -> int:
    """How many times smaller the deepest level of a UNet or VAE is than what goes in, along each axis."""
    return int(2 ** (len(config["block_out_channels"]) - 1))
