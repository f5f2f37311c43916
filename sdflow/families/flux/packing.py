"""Pack latents into rows of 2x2 patches, as FLUX.1's transformer reads them, and compute the patches' positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PATCH = 2


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Pack latents (batch, channels, rows, columns) to (batch, tokens, 4 * channels)."""
    batch, channels, rows, columns = latents.shape
    parts = latents.reshape(batch, channels, rows // PATCH, PATCH, columns // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return parts.reshape(batch, (rows // PATCH) * (columns // PATCH), channels * PATCH * PATCH)


def unpacked(tokens: torch.Tensor, rows: Any, columns: Any) -> torch.Tensor:
    """Invert `packed`, for latents of this many rows and columns."""
    batch, _, width = tokens.shape
    channels = width // PATCH**2
    parts = tokens.reshape(batch, rows // PATCH, columns // PATCH, channels, PATCH, PATCH)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows, columns)


def positions(rows: Any, columns: Any) -> torch.Tensor:
    """Return (tokens, 3): 0, row and column of each patch, as integers, which no 16-bit conversion rounds."""
    import torch

    size = rows // PATCH, columns // PATCH
    down, across = (torch.arange(count) for count in size)
    grid = down[:, None].expand(size), across[None].expand(size)
    return torch.stack([torch.zeros_like(grid[0]), *grid], dim=-1).reshape(-1, 3)


def size_of(ids: torch.Tensor) -> tuple[int, int]:
    """Return rows and columns of latents with these positions."""
    rows, columns = (int(ids[:, axis].max() + 1) * PATCH for axis in (1, 2))
    return rows, columns
