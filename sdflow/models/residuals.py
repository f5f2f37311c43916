"""What a ControlNet gives and a UNet takes: a tensor for each skip connection, and one for the middle.

A UNet has inputs for them where its config has `control_residuals`. diffusers' config.json knows no such entry: a family sets
it where a pipeline has ControlNets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdflow.models.base import Config, Port, divided

if TYPE_CHECKING:
    import torch

CONTROLLED = "control_residuals"
"""The entry of a UNet's config."""
MIDDLE = "mid_block_additional_residual"
_SKIP = "down_block_additional_residual_"


def is_residual(name: str) -> bool:
    """Whether a port of this name is one of them."""
    return name == MIDDLE or name.startswith(_SKIP)


def residual_ports(config: Config) -> tuple[Port, ...]:
    """A port for each, in the order of diffusers, the middle last. config: of a UNet or of a ControlNet."""
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
    """The arguments of a call of diffusers' UNet, of inputs by name. None where there are no residuals."""
    if MIDDLE not in inputs:
        return {}
    skips = tuple(inputs[f"{_SKIP}{index}"] for index in range(sum(map(is_residual, inputs)) - 1))
    return {"down_block_additional_residuals": skips, MIDDLE: inputs[MIDDLE]}


def by_name(skips: Sequence[torch.Tensor] | None, middle: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Residuals as diffusers has them, by name; none where there are none."""
    if skips is None or middle is None:
        return {}
    return {**{f"{_SKIP}{index}": value for index, value in enumerate(skips)}, MIDDLE: middle}
