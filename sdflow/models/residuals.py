"""Residuals from a ControlNet to a UNet: one tensor per skip connection, and one for the middle block.

A UNet has inputs for them if its config has `control_residuals`, sdflow's own entry, which a family sets for pipelines
with ControlNets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdflow.models.base import Config
from sdflow.models.ports import Port, divided

if TYPE_CHECKING:
    import torch

CONTROLLED = "control_residuals"
"""Entry of the UNet's config."""
MIDDLE = "mid_block_additional_residual"
_SKIP = "down_block_additional_residual_"


def is_residual(name: str) -> bool:
    """Whether the port is a residual."""
    return name == MIDDLE or name.startswith(_SKIP)


def residual_ports(config: Config) -> tuple[Port, ...]:
    """Return the residual ports in diffusers' order, the middle last. config: of a UNet or a ControlNet."""
    widths, layers = config["block_out_channels"], config["layers_per_block"]
    levels = [(widths[0], 0)]
    for level, width in enumerate(widths):
        levels += [(width, level)] * (layers if isinstance(layers, int) else layers[level])
        if level + 1 < len(widths):
            levels.append((width, level + 1))
    ports = [_port(f"{_SKIP}{index}", width, level) for index, (width, level) in enumerate(levels)]
    return (*ports, _port(MIDDLE, widths[-1], len(widths) - 1))


def _port(name: str, width: int, level: int) -> Port:
    return Port(
        name, "float32", ("batch", width, *(divided(axis, 2**level) for axis in ("latent_height", "latent_width")))
    )


def as_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert inputs by name to arguments of diffusers' UNet; empty without residuals."""
    if MIDDLE not in inputs:
        return {}
    skips = tuple(inputs[f"{_SKIP}{index}"] for index in range(sum(map(is_residual, inputs)) - 1))
    return {"down_block_additional_residuals": skips, MIDDLE: inputs[MIDDLE]}


def by_name(skips: Sequence[torch.Tensor] | None, middle: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Convert diffusers' residuals, (batch, channels, rows, columns) each, to inputs by name; empty without residuals."""
    if skips is None or middle is None:
        return {}
    return {**{f"{_SKIP}{index}": value for index, value in enumerate(skips)}, MIDDLE: middle}
