"""Encode and decode images with the VAE one at a time, in tiles if memory is short."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sdflow.errors import TiledWarning
from sdflow.families.shared.latents import Latents
from sdflow.machine.memory import available_bytes
from sdflow.models.ports import Role
from sdflow.models.vae_half import DecoderHalf
from sdflow.runtime.sessions.residency import HEADROOM
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.working_bytes import row_bytes
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import torch

TILE_OVERLAP = 0.25
TILE = 512
"""Default tile side in pixels, for VAEs whose config does not have their own size."""


LEAST_TILE = 256
"""Minimum tile side in pixels: smaller tiles look visibly different from each other."""

SHARE = 0.8
"""Fraction of free memory that a run's estimate may use."""

ALWAYS_THERE = 1 << 28
"""Runs with smaller estimates (in bytes) do not check free memory."""


def tile_pixels(config: Mapping[str, Any]) -> int:
    """Return the tile side in pixels: the image size that the VAE was made for."""
    return int(config.get("sample_size", TILE))


def tile_side(half: Submodel, rows: int, columns: int, scale: int, tiles: bool | None) -> int | None:
    """Return the tile side in pixels for latents of this size, or None to process the whole.

    scale: pixels per latent. tiles: None: tile only if the whole would exceed free memory, with tiles of the VAE's own
    size, halved until one fits.
    """
    own = tile_pixels(half.config)
    if tiles is not None:
        return own if tiles and max(rows, columns) * scale > own else None
    if half.static_shapes or half.profiles:  # each tile size would be compiled, and the device's memory is unknown
        return None
    wanted = _wanted(half, rows, columns)
    if wanted <= max(ALWAYS_THERE, half.reached):
        return None
    free = SHARE * _room(half)
    side = own
    while side // 2 >= LEAST_TILE and _wanted(half, side // scale, side // scale) > free:
        side //= 2
    tiled = wanted > free and max(rows, columns) * scale > side
    if half.residency is not None:
        least = _wanted(half, side // scale, side // scale) if tiled else wanted
        half.residency.make_room(int(least / SHARE) + HEADROOM)
    return side if tiled else None


def decode(
    decoder: Submodel, latents: torch.Tensor, what: Latents, *, tiles: bool | None = None
) -> Iterator[torch.Tensor]:
    """Decode latents (images, channels, rows, columns) to images (1, 3, height, width) in [-1, 1].

    Runs the decoder once per image: as fast as all at once, in the memory of one. Each image is valid until the next.
    tiles: see `tile_side`; unrequested tiling warns with TiledWarning.
    """

    def run(part: torch.Tensor) -> torch.Tensor:
        bound = decoder.bound(**{given: tuple(part.shape)})
        bound.inputs[given].copy_(part)
        return bound.run()[made]

    given, made = decoder.port(Role.LATENTS), decoder.port(Role.PIXELS)
    rows, columns = latents.shape[2:]
    side = _chosen(decoder, rows, columns, what.scale, tiles)
    for latent in what.to_vae(latents).split(1):
        if side is None:
            yield run(latent)
            _reached(decoder, rows, columns)
        else:
            yield in_tiles(run, latent, side // what.scale, side)


def encode(encoder: Submodel, images: torch.Tensor, what: Latents, *, tiles: bool | None = None) -> torch.Tensor:
    """Encode images (images, 3, height, width) in [-1, 1] to float32 latents: the mean of the distribution. tiles: see
    `decode`."""
    import torch

    def run(part: torch.Tensor) -> torch.Tensor:
        bound = encoder.bound(**{given: tuple(part.shape)})
        bound.inputs[given].copy_(part)
        return bound.run()[made]

    given, made = encoder.port(Role.PIXELS), encoder.port(Role.LATENTS)
    rows, columns = (size // what.scale for size in images.shape[2:])
    side = _chosen(encoder, rows, columns, what.scale, tiles)
    encoded = []
    for image in images.split(1):
        found = run(image) if side is None else in_tiles(run, image, side, side // what.scale)
        encoded.append(found.to(torch.float32, copy=True))
    if side is None:
        _reached(encoder, rows, columns)
    latents: torch.Tensor = what.from_vae(torch.cat(encoded))
    return latents


def _chosen(half: Submodel, rows: int, columns: int, scale: int, tiles: bool | None) -> int | None:
    side = tile_side(half, rows, columns, scale, tiles)
    if side is not None and tiles is None:
        wanted = _wanted(half, rows, columns)
        free = _room(half)
        warnings.warn(
            f"the {half.part.name.replace('_', ' ')} is tiled ({side} pixels), which changes the image slightly: "
            f"without tiles it needs about {spell_bytes(wanted)}, but only {spell_bytes(free)} are free",
            TiledWarning,
            stacklevel=3,
        )
    return side


def _wanted(half: Submodel, rows: int, columns: int) -> int:
    """Return the working memory in bytes for latents of this size. On CUDA, decoders were measured up to the VAE's own
    size (`Model.device_factor`, in float32); for larger images and encoders, the estimate is an upper bound."""
    model, device = half.part.model, half.place.device
    whole = row_bytes(model, half.config, (rows, columns), device)
    own = tile_pixels(half.config) // (model.scale(half.config) or 1)
    measured = device.startswith("cuda") and isinstance(model, DecoderHalf) and rows * columns <= own * own
    return int(whole * model.device_factor) if measured else whole


def _room(half: Submodel) -> int:
    """Return the bytes available on the half's device, once all weights that can leave it have left."""
    return available_bytes(half.place.device) if half.residency is None else half.residency.reachable()


def _reached(half: Submodel, rows: int, columns: int) -> None:
    """Record that the session now retains memory for a run of this size, unless it is returned to the device."""
    if half.residency is not None:
        return
    wanted = _wanted(half, rows, columns)
    half.reached = max(half.reached, wanted)


def in_tiles(
    run: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor, size: int, out_size: int
) -> torch.Tensor:
    """Run overlapping square tiles of `whole`, and blend them at their seams.

    size, out_size: tile size before and after `run`. Tiles and blending match diffusers' AutoencoderKL (0.42),
    `tiled_decode` and `_tiled_encode`.
    """
    import torch

    step, blended = int(size * (1 - TILE_OVERLAP)), int(out_size * TILE_OVERLAP)
    rows = [
        [run(whole[:, :, top : top + size, left : left + size]).clone() for left in range(0, whole.shape[3], step)]
        for top in range(0, whole.shape[2], step)
    ]
    for index, row in enumerate(rows):
        for column, tile in enumerate(row):
            if index > 0:
                _blend(rows[index - 1][column], tile, blended, 2)
            if column > 0:
                _blend(row[column - 1], tile, blended, 3)
    keep = out_size - blended
    return torch.cat([torch.cat([tile[:, :, :keep, :keep] for tile in row], 3) for row in rows], 2)


def _blend(before: torch.Tensor, tile: torch.Tensor, extent: int, axis: int) -> None:
    """Blend the end of `before` into the beginning of `tile`, in place."""
    import torch

    extent = min(before.shape[axis], tile.shape[axis], extent)
    weight = torch.arange(extent, device=tile.device, dtype=tile.dtype) / extent
    weight = weight.reshape([-1 if each == axis else 1 for each in range(4)])
    begin = tile.narrow(axis, 0, extent)
    end = before.narrow(axis, before.shape[axis] - extent, extent)
    begin.copy_(end * (1 - weight) + begin * weight)
