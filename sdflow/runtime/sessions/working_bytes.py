"""What a run of a network takes in memory beside its weights, estimated from its config (`Model.working_values`)."""

from __future__ import annotations

from sdflow.machine.memory import HOST
from sdflow.models.base import Config, Model

BYTES = 4
"""Of a value. float16 graphs keep some in float32; theirs are estimated too high."""


def row_bytes(model: Model, config: Config, size: tuple[int, int], device: str) -> int:
    """For one row of latents with these rows and columns."""
    return BYTES * model.working_values(config, *size, scores=device == HOST)
