"""Limits on classifier-free guidance: ending it early, and limiting the norm of its result.

As in diffusers' ZImagePipeline (0.42): `cfg_truncation`, `cfg_normalization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.parameter import Parameter

TRUNCATION, NORMALIZATION = "cfg_truncation", "cfg_normalization"

ARGUMENTS: Mapping[str, Parameter] = {
    TRUNCATION: Parameter(
        "Guidance is on until this fraction of the noise is gone.", float, least=0, most=1, otherwise="1"
    ),
    NORMALIZATION: Parameter(
        "Largest norm of a guided prediction, as a multiple of the norm without guidance; 0: no limit.",
        float,
        least=0,
        most=1000,
        otherwise="0",
    ),
}
"""Arguments of families that support them, with diffusers' names."""
_TRAINED = 1000
"""Number of training timesteps; the last one is pure noise."""


@dataclass(frozen=True)
class GuidanceLimits:
    """Limits on classifier-free guidance.

    truncation: fraction of the noise after which guidance ends. normalization: limit of the norm; 0: none.
    """

    truncation: float = 1.0
    normalization: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GuidanceLimits:
        """Create from a call's arguments, None if not given."""
        truncation, normalization = given.get(TRUNCATION), given.get(NORMALIZATION)
        return cls(1.0 if truncation is None else float(truncation), float(normalization or 0.0))

    def guided(self, timesteps: Any) -> list[bool]:
        """Return whether guidance applies at each timestep (1000 to 0, a float32 tensor), computed as in diffusers."""
        return [gone <= self.truncation for gone in ((_TRAINED - timesteps) / _TRAINED).flatten().tolist()]


UNLIMITED = GuidanceLimits()
