"""Denoiser inputs that change from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from sdflow.models.ports import Ports, Role


@dataclass(frozen=True)
class Moving:
    """Names of the inputs."""

    latents: str
    timestep: str

    @classmethod
    def of(cls, ports: Ports) -> Moving:
        """Return the names for a denoiser with these ports."""
        return cls(ports.of(Role.LATENTS), ports.of(Role.TIMESTEP))
