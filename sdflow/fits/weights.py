"""Bytes of the weights of a graph that is yet to be built: by its architecture and the chain of passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sdflow.config.workflow import StepSpec
from sdflow.fits.low_bits import LOW_BITS, is_named
from sdflow.models.base import Config, Model

FLOAT32, HALF = 4, 2
_TO_HALF = "OnnxFloatToFloat16"
_UPSAMPLED = 16, 9
"""A convolution of 3x3 behind an upsampling becomes four of 2x2 (SubpixelConv)."""


def is_half(steps: Sequence[StepSpec]) -> bool:
    """Whether a chain makes a graph of 16 bits."""
    return any(step.pass_name == _TO_HALF for step in steps)


def parameter_count(model: Model, config: Config) -> int | None:
    """Parameters that its graph holds; None where the arithmetic does not cover the config."""
    found = model.graph_parameters(config)
    return None if found is None else sum(map(prod, found.values()))


def weight_bytes(model: Model, config: Config, steps: Sequence[StepSpec]) -> int | None:
    """Bytes of the weights of a submodel's graph behind these passes; None where the arithmetic does not cover its config.

    Left out: constants, and what norms keep in float32 (below 1 % at full size).
    """
    parameters = model.graph_parameters(config)
    if parameters is None:
        return None
    chain = {step.pass_name: step.options for step in steps}
    quantizing = [(LOW_BITS[name], chain[name]) for name in chain if name in LOW_BITS]
    exact = chain.get(_TO_HALF, {}).get("node_block_list") or ()
    total = 0
    for name, shape in parameters.items():
        held = HALF if _TO_HALF in chain and not is_named(name, exact) else FLOAT32
        count = prod(shape)
        if "SubpixelConv" in chain and "upsamplers" in name and len(shape) == 4:
            count = count * _UPSAMPLED[0] // _UPSAMPLED[1]
        taking = next((each for each, options in quantizing if each.taken(name, shape, options)), None)
        if taking is None:
            total += held * count
        else:
            total += taking.size(shape, held, next(options for each, options in quantizing if each is taking))
    return total
