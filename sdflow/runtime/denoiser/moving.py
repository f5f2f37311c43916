"""The inputs of a denoiser that change from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from sdflow.models.base import Ports, Role


@dataclass(frozen=True)
class Moving:
    """Their names."""

    latents: str
    timestep: str

    @classmethod
    def of(cls, ports: Ports) -> Moving:
        """Those of a denoiser with these ports."""
        return cls(ports.of(Role.LATENTS), ports.of(Role.TIMESTEP))
