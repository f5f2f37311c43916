"""Latents to images and back, one at a time; in tiles where memory is short."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sdflow.errors import TiledWarning
from sdflow.families.shared.latents import Latents
from sdflow.machine.memory import available_bytes
from sdflow.models.base import Role
from sdflow.runtime.sessions.submodel import Submodel
from sdflow.runtime.sessions.working_bytes import row_bytes
from sdflow.units import spell_bytes

if TYPE_CHECKING:
    import torch

TILE_OVERLAP = 0.25
TILE = 512
"""Pixels of a tile's side for a VAE whose config does not say what size it was made for."""


LEAST_TILE = 256
"""Pixels: smaller ones look different from one another."""

SHARE = 0.8
"""Of the memory that is free, what a run may be expected to take."""

ALWAYS_THERE = 1 << 28
"""Bytes for which free memory is not looked up."""


def tile_pixels(config: Mapping[str, Any]) -> int:
    """Pixels of a tile's side: of the images that a VAE with this config was made for."""
    return int(config.get("sample_size", TILE))


def tile_side(half: Submodel, rows: int, columns: int, scale: int, tiles: bool | None) -> int | None:
    """Pixels of the side of the tiles that a half of a VAE works in on latents of this size; None: on the whole.

    scale: pixels per latent. tiles: None: where the whole would not fit in the memory that is free; then tiles are of the size
    that the VAE was made for, or halved until one fits.
    """
    own = tile_pixels(half.config)
    if tiles is not None:
        return own if tiles and max(rows, columns) * scale > own else None
    if (
        half.static_shapes or half.profiles
    ):  # each size of a tile would be compiled, for a device whose memory is not known
        return None
    device, model = half.place.device, half.part.model
    wanted = row_bytes(model, half.config, (rows, columns), device)
    if wanted <= max(ALWAYS_THERE, half.reached):
        return None
    if half.residency is not None:
        half.residency.make_room(int(wanted / SHARE))
    free = SHARE * _room(half)
    if wanted <= free:
        return None
    side = own
    while side // 2 >= LEAST_TILE and row_bytes(model, half.config, (side // scale,) * 2, device) > free:
        side //= 2
    return side if max(rows, columns) * scale > side else None


def decode(
    decoder: Submodel, latents: torch.Tensor, what: Latents, *, tiles: bool | None = None
) -> Iterator[torch.Tensor]:
    """Images (1, 3, height, width) in [-1, 1] of latents (images, channels, rows, columns).

    One run of the decoder each: as fast as all at once, in the memory of one. Each is good until the next. tiles: as of
    `tile_side`; TiledWarning says where that was not asked for.
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
    """Latents, float32, of images (images, 3, height, width) in [-1, 1]: the mean of the encoder's distribution. tiles: as of
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
        wanted = row_bytes(half.part.model, half.config, (rows, columns), half.place.device)
        free = _room(half)
        warnings.warn(
            f"the {half.part.name.replace('_', ' ')} works in tiles of {side} pixels, which changes the image a little: "
            f"all of it at once would take about {spell_bytes(wanted)}, and {spell_bytes(free)} are free",
            TiledWarning,
            stacklevel=3,
        )
    return side


def _room(half: Submodel) -> int:
    """Bytes that can still be taken on its device."""
    return available_bytes(half.place.device) if half.residency is None else half.residency.room()


def _reached(half: Submodel, rows: int, columns: int) -> None:
    """Its session's memory holds a run of this size from now on, where it does not go back to the device."""
    if half.residency is not None:
        return
    wanted = row_bytes(half.part.model, half.config, (rows, columns), half.place.device)
    half.reached = max(half.reached, wanted)


def in_tiles(
    run: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor, size: int, out_size: int
) -> torch.Tensor:
    """`run` on overlapping square tiles of `whole`, put together with soft seams.

    size, out_size: of a tile before and after `run`. The tiles and the blending are those of diffusers' AutoencoderKL
    (0.42), `tiled_decode` and `_tiled_encode`.
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
    """Fade from the end of `before` into the beginning of `tile`, in place."""
    import torch

    extent = min(before.shape[axis], tile.shape[axis], extent)
    weight = torch.arange(extent, device=tile.device, dtype=tile.dtype) / extent
    weight = weight.reshape([-1 if each == axis else 1 for each in range(4)])
    begin = tile.narrow(axis, 0, extent)
    end = before.narrow(axis, before.shape[axis] - extent, extent)
    begin.copy_(end * (1 - weight) + begin * weight)
