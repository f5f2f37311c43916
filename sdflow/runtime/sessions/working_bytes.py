"""Estimate a network's working memory besides its weights from its config (`Model.working_values`)."""

from __future__ import annotations

from sdflow.machine.memory import HOST
from sdflow.models.base import Config, Model

BYTES = 4
"""Bytes per value. float16 graphs keep some values in float32; their estimates are too high."""


def row_bytes(model: Model, config: Config, size: tuple[int, int], device: str) -> int:
    """Return the working memory in bytes for one row of latents of this size (rows, columns)."""
    return BYTES * model.working_values(config, *size, scores=device == HOST)
