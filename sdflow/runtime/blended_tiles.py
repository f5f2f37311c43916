"""Run an image network on overlapping tiles and blend them, for graphs that cannot run in bands of rows.

The image differs slightly from an untiled one, because each tile is normalized by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TILE_OVERLAP = 0.25


def in_tiles(
    run: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor, size: int, out_size: int
) -> torch.Tensor:
    """Run overlapping square tiles of `whole`, and blend them where they overlap.

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
