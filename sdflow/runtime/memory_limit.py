"""Maximum image size of a pipeline on this machine, limited by the model's training size and by memory.

A run's working memory is estimated from the configs of its networks (`Model.working_values`). Time matters too, as
attention grows with the square of the pixels: an image with 64 times the model's own pixels took 316 seconds instead of
0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.families.shared.base import Family
from sdflow.machine.memory import HOST, available_bytes
from sdflow.runtime.bands.memory import LEAST_BAND, band_bytes, stored_bytes
from sdflow.runtime.files.folder import folder_configs, folder_family
from sdflow.runtime.sessions.working_bytes import BYTES, row_bytes
from sdflow.runtime.vae import tile_pixels

MOST_SIDES = 4
"""Maximum square root of an image's pixels, relative to the model's own side. Beyond that, models repeat content."""

SHARE = 0.9
"""Fraction of available memory to plan with; other processes use some meanwhile."""

IMAGE_COPIES = 8
"""Maximum number of float32 copies of the pixels after the decoder: tiles, whole, clamped, as bytes."""


def most_pixels(folder: Path, available: int | None = None, *, images: int = 1, device: str = HOST) -> int:
    """Return the maximum number of pixels (height times width) of an image of this pipeline folder on this machine.

    The minimum of MOST_SIDES squared times the model's own pixels, and what fits in memory with guidance and the
    VAE in bands. Never less than the model's own size.

    folder: a pipeline folder, loaded or not; only its configs are read, and for "cpu" neither torch nor ONNX Runtime is
    imported. available: bytes available on top of current use; None: as measured now on the device. Call it in the
    inference process with the weights loaded, or leave room for them. images: batch size. device: "cpu" or "cuda".
    Raises UsageError if it is not a pipeline folder.
    """
    return most_pixels_of(folder_family(folder), folder_configs(folder), available, images=images, device=device)


def most_pixels_of(
    family: Family,
    configs: Mapping[str, Mapping[str, Any]],
    available: int | None = None,
    *,
    images: int = 1,
    device: str = HOST,
) -> int:
    """Like `most_pixels`, for a pipeline of this family with these configs by submodel."""
    latents = family.latents(configs)
    room = int(SHARE * (available_bytes(device) if available is None else available))
    # Bisect over multiples of the side's granularity: memory grows with size.
    least, most = latents.size // latents.multiple, MOST_SIDES * latents.size // latents.multiple
    while least < most:
        middle = (least + most + 1) // 2
        if drawing_bytes(family, configs, middle * latents.multiple, images=images, device=device) <= room:
            least = middle
        else:
            most = middle - 1
    return (least * latents.granularity) ** 2


def drawing_bytes(
    family: Family, configs: Mapping[str, Mapping[str, Any]], side: int, *, images: int = 1, device: str = HOST
) -> int:
    """Estimate the memory besides weights to draw square images of this latent side: a denoiser step with guidance and
    its ControlNets, whose memory is retained, and the decoder: whole up to its own size, in bands for larger images."""
    latents = family.latents(configs)
    nets = family.nets(configs).values()
    rows = 2 * images
    step = sum(working_bytes(family, name, configs[name], side, device) for name in (family.denoiser, *nets))
    tile = min(side, tile_pixels(configs[family.decoder]) // latents.scale)
    decoded = working_bytes(family, family.decoder, configs[family.decoder], tile, device)
    pixels = (side * latents.scale) ** 2
    if side > tile:
        config, least = configs[family.decoder], min(side, LEAST_BAND)
        model = family.part(family.decoder).of(config).model
        stored = stored_bytes(config, side * latents.scale, side * latents.scale) if device == HOST else 0
        decoded = max(decoded, stored + band_bytes(model, config, (side, side), least, latents.scale))
    return rows * step + decoded + IMAGE_COPIES * images * pixels * 3 * BYTES


def working_bytes(family: Family, name: str, config: Mapping[str, Any], side: int, device: str) -> int:
    """Estimate the memory of a submodel's run besides its weights, for one row of latents of this side."""
    return row_bytes(family.part(name).of(config).model, config, (side, side), device)


def device_run_bytes(family: Family, name: str, config: Mapping[str, Any], side: int, *, half: bool) -> int:
    """Estimate the memory of a submodel's run on CUDA besides its weights, for one row of latents of this side, from
    measured peaks. half: whether its graph is in 16 bits."""
    factor = family.part(name).of(config).model.device_factor / (2 if half else 1)
    return int(working_bytes(family, name, config, side, "cuda") * factor)
