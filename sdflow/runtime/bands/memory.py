"""Estimates of the memory of a VAE half in bands, from its config: the graph is not read."""

from __future__ import annotations

from sdflow.models.base import Config, Model, halved
from sdflow.models.working_memory import VAE_SCORES
from sdflow.runtime.sessions.working_bytes import BYTES

LEAST_BAND = 4
"""Minimum rows of latents in a band; of these, one or two at each end are discarded."""


def band_bytes(model: Model, config: Config, size: tuple[int, int], band: int, scale: int) -> int:
    """Return the working memory in bytes of a band. size: rows and columns of the latents; band: rows of it. scale:
    pixels per latent. Attention needs all keys for each of the band's queries."""
    rows, columns = size
    values = model.working_values(config, band, columns, scores=False)
    finer = (scale // halved(config)) ** 2
    scores = VAE_SCORES * band * rows * (columns * finer) ** 2 if config.get("mid_block_add_attention", True) else 0
    return BYTES * max(values, scores)


def stored_bytes(config: Config, height: int, width: int) -> int:
    """Return the bytes of what is stored between stages for an image of this size: at full size, the input of a block
    with its shortcut, and the block's inner value."""
    levels = [config[name] for name in ("block_out_channels", "decoder_block_out_channels") if config.get(name)]
    channels = max(max(widths[:2]) + 2 * widths[0] for widths in levels)
    return BYTES * int(channels) * height * width
