"""Estimates of the memory of a VAE half in bands, from its config: the graph is not read."""

from __future__ import annotations

from sdflow.models.base import Config, Model, halved
from sdflow.models.working_memory import VAE_SCORES, VAE_TENSORS, block_channels
from sdflow.runtime.sessions.working_bytes import BYTES

LEAST_BAND = 6
"""Minimum rows of latents in a band; of these, at most two at each end are discarded."""

BAND_TENSORS = 9
"""Tensors of a level's width in a band, instead of a whole half's VAE_TENSORS: inputs and outputs of a stage exist all the
time, normalizations are several operators, and statistics need two copies."""


def band_bytes(model: Model, config: Config, size: tuple[int, int], band: int, scale: int) -> int:
    """Return the working memory in bytes of a band. size: rows and columns of the latents; band: rows of it. scale:
    pixels per latent. Attention needs all keys for each of the band's queries."""
    rows, columns = size
    values = model.working_values(config, band, columns, scores=False) * BAND_TENSORS // VAE_TENSORS
    finer = (scale // halved(config)) ** 2
    scores = VAE_SCORES * band * rows * (columns * finer) ** 2 if config.get("mid_block_add_attention", True) else 0
    return BYTES * max(values, scores)


def stored_bytes(config: Config, height: int, width: int) -> int:
    """Return the bytes of what is stored between stages for an image of this size: at full size, the input of a block
    with its shortcut, and the block's inner value."""
    return BYTES * block_channels(config) * height * width
