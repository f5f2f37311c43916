"""Limits on classifier-free guidance: it ends on the way, or its result is scaled down to the norm of the prompt's own.

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
"""The arguments of a family that has them, as diffusers names them."""
_TRAINED = 1000
"""Timesteps: the last is noise alone."""


@dataclass(frozen=True)
class GuidanceLimits:
    """truncation: the fraction of the noise after which there is no guidance. normalization: of the norm; 0: no limit."""

    truncation: float = 1.0
    normalization: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GuidanceLimits:
        """From the arguments of a call, None where not given."""
        truncation, normalization = given.get(TRUNCATION), given.get(NORMALIZATION)
        return cls(1.0 if truncation is None else float(truncation), float(normalization or 0.0))

    def guided(self, timesteps: Any) -> list[bool]:
        """Whether there is guidance at each of these timesteps, 1000 to 0: a float32 tensor, as diffusers computes it."""
        return [gone <= self.truncation for gone in ((_TRAINED - timesteps) / _TRAINED).flatten().tolist()]


UNLIMITED = GuidanceLimits()
