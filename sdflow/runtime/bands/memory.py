"""Estimate the memory of a VAE half that runs in bands, from its config alone."""

from __future__ import annotations

from sdflow.models.base import Config, Model, halved
from sdflow.models.working_memory import VAE_SCORES, VAE_TENSORS, block_channels
from sdflow.runtime.sessions.working_bytes import BYTES

LEAST_BAND = 6
"""Minimum latent rows per band; at most two at each end are discarded."""

BAND_TENSORS = 9
"""Tensors of a level's width that exist at once in a band (VAE_TENSORS for a whole half): a stage's inputs and outputs stay
allocated, normalizations are several operators, and statistics need two copies."""


def band_bytes(model: Model, config: Config, size: tuple[int, int], band: int, scale: int) -> int:
    """Return the working memory of a band in bytes. size: rows and columns of the latents. band: latent rows per band. scale:
    pixels per latent. Includes the attention scores of the band's queries with the keys of the whole image."""
    rows, columns = size
    values = model.working_values(config, band, columns, scores=False) * BAND_TENSORS // VAE_TENSORS
    finer = (scale // halved(config)) ** 2
    scores = VAE_SCORES * band * rows * (columns * finer) ** 2 if config.get("mid_block_add_attention", True) else 0
    return BYTES * max(values, scores)


def stored_bytes(config: Config, height: int, width: int) -> int:
    """Return the bytes stored between stages for an image of this size in pixels: at full size, the input of a residual block,
    kept for its shortcut, and the block's inner value."""
    return BYTES * block_channels(config) * height * width
