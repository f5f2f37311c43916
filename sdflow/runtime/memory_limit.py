"""The largest image that a pipeline draws on this machine: by what its model was made for, and by the memory that is there.

What a run works in is estimated from the configs of its networks (`Model.working_values`). In time, too, attention grows with the
square of the pixels: an image of 64 times the pixels that a model was made for took 316 seconds where its own take 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.families.shared.base import Family
from sdflow.machine.memory import HOST, available_bytes
from sdflow.runtime.files.folder import folder_family, onnx_submodels, submodel_config
from sdflow.runtime.sessions.working_bytes import BYTES, row_bytes
from sdflow.runtime.vae import tile_pixels

MOST_SIDES = 4
"""How many times the model's own side, in pixels, an image may have in the square root of its pixels. Beyond that, models
repeat what they draw."""

SHARE = 0.9
"""Of the available memory that may be planned with: other processes take some meanwhile."""

IMAGE_COPIES = 8
"""How many float32 copies of the pixels there are at once behind the decoder, at most: tiles, whole, clamped, in bytes."""


def most_pixels(folder: Path, available: int | None = None, *, images: int = 1, device: str = HOST) -> int:
    """The most pixels (height times width) that an image of this pipeline folder may have on this machine.

    The least of two numbers: MOST_SIDES squared times the pixels that the model was made for, and what fits in memory with
    guidance, VAE in tiles. Never less than the model's own size, which is drawn whenever the pipeline can be loaded.

    folder: a pipeline folder, loaded or not; nothing but its configs is read, and neither torch nor ONNX Runtime is imported
    for "cpu". available: bytes that drawing may take beside what is in memory now; None: as measured now, on the device. Call it
    in the process that draws, with the weights loaded, or leave room for them. images: drawn in one batch. device: "cpu" or
    "cuda". Raises UsageError for what is no pipeline folder.
    """
    family = folder_family(folder)
    configs = {name: submodel_config(folder, name) for name in onnx_submodels(folder)}
    return most_pixels_of(family, configs, available, images=images, device=device)


def most_pixels_of(
    family: Family,
    configs: Mapping[str, Mapping[str, Any]],
    available: int | None = None,
    *,
    images: int = 1,
    device: str = HOST,
) -> int:
    """The same for a pipeline of this family with these configs, by submodel."""
    latents = family.latents(configs)
    room = int(SHARE * (available_bytes(device) if available is None else available))
    # In steps of what the image's sides are multiples of; bisected: the need grows with the size.
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
    """What drawing square images of latents with this side takes beside the weights: a step of the denoiser with guidance and
    its ControlNets, whose memory stays, and the decoder in tiles of the size that it was made for."""
    latents = family.latents(configs)
    nets = family.nets(configs).values()
    rows = 2 * images
    step = sum(working_bytes(family, name, configs[name], side, device) for name in (family.denoiser, *nets))
    tile = min(side, tile_pixels(configs[family.decoder]) // latents.scale)
    decoded = working_bytes(family, family.decoder, configs[family.decoder], tile, device)
    pixels = (side * latents.scale) ** 2
    return rows * step + decoded + IMAGE_COPIES * images * pixels * 3 * BYTES


def working_bytes(family: Family, name: str, config: Mapping[str, Any], side: int, device: str) -> int:
    """What a run of a submodel takes beside its weights, for one row of latents with this side."""
    return row_bytes(family.part(name).of(config).model, config, (side, side), device)
