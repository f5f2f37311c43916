"""Bytes of a graph's weights before it is built, from its architecture and chain of passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sdflow.config.workflow import StepSpec
from sdflow.fits.low_bits import EMBEDDED, LOW_BITS, is_named
from sdflow.models.base import Config, Model
from sdflow.runtime.sessions.stream_plan import LEAST

FLOAT32, HALF = 4, 2
_TO_HALF = "OnnxFloatToFloat16"
_STREAMED_LOW_BITS = "QuantizeFp8"
"""The pass whose operator reads its weights as they are in the file."""
_UPSAMPLED = 16, 9
"""A 3x3 convolution after an upsampling becomes four of 2x2 (SubpixelConv)."""


def is_half(steps: Sequence[StepSpec]) -> bool:
    """Whether a chain makes a 16-bit graph."""
    return any(step.pass_name == _TO_HALF for step in steps)


def scores_are_float32(steps: Sequence[StepSpec]) -> bool:
    """Whether a chain keeps the attention scores of a 16-bit graph in float32."""
    kept = [name for step in steps if step.pass_name == _TO_HALF for name in step.options.get("node_block_list") or ()]
    return any(name.endswith("/Softmax") for name in kept)


def parameter_count(model: Model, config: Config) -> int | None:
    """Number of parameters in its graph; None if the config is not covered."""
    found = model.graph_parameters(config)
    return None if found is None else sum(map(prod, found.values()))


def weight_bytes(model: Model, config: Config, steps: Sequence[StepSpec]) -> int | None:
    """Bytes of the weights of a submodel's graph after these passes; None if its config is not covered.

    Ignores constants, and norms kept in float32 (below 1 % at full size).
    """
    found = _sizes(model, config, steps)
    return None if found is None else sum(size for size, _ in found)


def streamable_bytes(model: Model, config: Config, steps: Sequence[StepSpec]) -> tuple[int, int]:
    """Bytes of those weights that can be streamed to the device (`sdflow.runtime.sessions.stream_plan`), and of the
    largest of them."""
    sizes = [size for size, streamable in _sizes(model, config, steps) or () if streamable]
    return sum(sizes), max(sizes, default=0)


def _sizes(model: Model, config: Config, steps: Sequence[StepSpec]) -> list[tuple[int, bool]] | None:
    """The bytes of each weight, and whether it can be streamed."""
    parameters = model.graph_parameters(config)
    if parameters is None:
        return None
    chain = {step.pass_name: step.options for step in steps}
    quantizing = {name: LOW_BITS[name] for name in chain if name in LOW_BITS}
    exact = chain.get(_TO_HALF, {}).get("node_block_list") or ()
    found = []
    for name, shape in parameters.items():
        held = HALF if _TO_HALF in chain and not is_named(name, exact) else FLOAT32
        count = prod(shape)
        if "SubpixelConv" in chain and "upsamplers" in name and len(shape) == 4:
            count = count * _UPSAMPLED[0] // _UPSAMPLED[1]
        by = next((each for each, low in quantizing.items() if low.taken(name, shape, chain[each])), None)
        size = held * count if by is None else quantizing[by].size(shape, held, chain[by])
        product = len(shape) == 2 and name.endswith(".weight") and not EMBEDDED.search(name)
        found.append((size, product and size >= LEAST and by in (None, _STREAMED_LOW_BITS)))
    return found
