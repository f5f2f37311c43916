"""Latents to images and back, one at a time; in tiles where memory is short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sdflow.families.latents import Latents
from sdflow.runtime.submodel import Submodel

if TYPE_CHECKING:
    import torch

TILE_OVERLAP = 0.25
TILE = 512
"""Pixels of a tile's side for a VAE whose config does not say what size it was made for."""


def tile_pixels(config: Mapping[str, Any]) -> int:
    """Pixels of a tile's side: of the images that a VAE with this config was made for."""
    return int(config.get("sample_size", TILE))


def decode(decoder: Submodel, latents: torch.Tensor, what: Latents, *, tiles: bool = False) -> Iterator[torch.Tensor]:
    """Images (1, 3, height, width) in [-1, 1] of latents (images, channels, rows, columns).

    One run of the decoder each: as fast as all at once, in the memory of one. Each is good until the next.
    """

    def run(part: torch.Tensor) -> torch.Tensor:
        bound = decoder.bound(latent_sample=tuple(part.shape))
        bound.inputs["latent_sample"].copy_(part)
        return bound.run()["sample"]

    size = tile_pixels(decoder.config)
    for latent in (latents / what.factor).split(1):
        yield _maybe_tiled(run, latent, size // what.scale, size, tiles)


def encode(encoder: Submodel, images: torch.Tensor, what: Latents, *, tiles: bool = False) -> torch.Tensor:
    """Latents, float32, of images (images, 3, height, width) in [-1, 1]: the mean of the encoder's distribution."""
    import torch

    def run(part: torch.Tensor) -> torch.Tensor:
        bound = encoder.bound(sample=tuple(part.shape))
        bound.inputs["sample"].copy_(part)
        return bound.run()["latent_sample"]

    size = tile_pixels(encoder.config)
    encoded = [
        _maybe_tiled(run, image, size, size // what.scale, tiles).to(torch.float32, copy=True)
        for image in images.split(1)
    ]
    return torch.cat(encoded) * what.factor


def _maybe_tiled(
    run: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor, size: int, out_size: int, tiles: bool
) -> torch.Tensor:
    if not tiles or max(whole.shape[2:]) <= size:
        return run(whole)
    return in_tiles(run, whole, size, out_size)


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
