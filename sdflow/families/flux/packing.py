"""Latents as the rows of packed 2x2 patches that FLUX.1's transformer reads, and the positions of these patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PATCH = 2


def packed(latents: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, 4 * channels) of latents (batch, channels, rows, columns)."""
    batch, channels, rows, columns = latents.shape
    parts = latents.reshape(batch, channels, rows // PATCH, PATCH, columns // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return parts.reshape(batch, (rows // PATCH) * (columns // PATCH), channels * PATCH * PATCH)


def unpacked(tokens: torch.Tensor, rows: Any, columns: Any) -> torch.Tensor:
    """The inverse of `packed`, for latents of so many rows and columns."""
    batch, _, width = tokens.shape
    channels = width // PATCH**2
    parts = tokens.reshape(batch, rows // PATCH, columns // PATCH, channels, PATCH, PATCH)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows, columns)


def positions(rows: Any, columns: Any) -> torch.Tensor:
    """(tokens, 3): 0, row and column of each patch."""
    import torch

    down, across = torch.arange(rows // PATCH), torch.arange(columns // PATCH)
    grid = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1).reshape(-1, 2)
    return torch.nn.functional.pad(grid, (1, 0)).float()


def size_of(ids: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of latents with these positions."""
    rows, columns = (int(ids[:, axis].max() + 1) * PATCH for axis in (1, 2))
    return rows, columns
