"""Prepare a fixed-size denoiser for a loop, so that rounds repeat no work (`sdflow.runtime.denoiser.split`).

Parts that depend only on the text run before the loop, and parts that depend only on the timestep run for all rounds at
once. With guidance, parts independent of the text run for half of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.errors import PassError, SlowerWarning
from sdflow.export.builder import Builder
from sdflow.export.inline import inlined
from sdflow.onnx_model.nodes import copied, refill
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.split import split

TIMESTEPS = "timesteps"
ROUND = "round"
"""The loop's round number."""


MOST = 7
"""Outputs of a Split: with its input they make the 8 buffers that a WebGPU kernel may access."""


@dataclass(frozen=True)
class Cut:
    """A denoiser without the parts that run before the loop.

    model: ModelProto of the denoiser that takes `time_values` in place of a timestep, and with guidance the latents
    once. timestep: ModelProto from timesteps, its input `given`, to the time values, one row per timestep.
    """

    model: Any
    timestep: Any
    time_values: tuple[str, ...]
    given: str


def cut(model: Any, sizes: Mapping[str, int], *, moving: Moving, guided: bool) -> Cut | None:
    """Split the denoiser; None, with a SlowerWarning, if that is not possible. sizes: of all axes."""
    try:
        parts = split(model, sizes, moving=moving, guidance=guided)
    except PassError as error:
        warnings.warn(f"the loop runs the denoiser as a whole: {error}", SlowerWarning, stacklevel=2)
        return None
    joined, text, step = copied(parts.step), parts.text.graph, parts.step.graph
    refill(joined.graph.node, [*text.node, *step.node])
    inputs = {item.name: item for item in (*text.input, *step.input) if item.name not in parts.text_values}
    refill(joined.graph.input, inputs.values())
    there = {tensor.name for tensor in step.initializer}
    joined.graph.initializer.extend(tensor for tensor in text.initializer if tensor.name not in there)
    infos = {item.name for item in step.value_info}
    given = [item for item in (*text.value_info, *step.input) if item.name not in infos | inputs.keys()]
    joined.graph.value_info.extend(given)
    return Cut(joined, parts.timestep, parts.time_values, moving.timestep)


def time_rows(graph: Builder, body: Builder, found: Cut, name: str) -> dict[str, str]:
    """The time values of a round: the model's input -> the value to read in the body, `name/input`. Values of one shape
    are stacked for all rounds before the loop, MOST at a time, so that a round needs one Gather and one Split."""
    times = inlined(found.timestep, f"{name}/{found.given}", {found.given: TIMESTEPS}, widened=False)
    graph.nodes.extend(times.nodes)
    graph.initializers.extend(times.initializers)
    alike: dict[tuple[int, ...], list[str]] = {}
    for item in found.model.graph.input:
        if item.name in found.time_values:
            of = item.type.tensor_type
            alike.setdefault((of.elem_type, *(axis.dim_value for axis in of.shape.dim)), []).append(item.name)
    together = [
        (shape, values[begin : begin + MOST])
        for shape, values in alike.items()
        for begin in range(0, len(values), MOST)
    ]
    for (_, rows, *rest), values in together:
        repeated = graph.whole(1, rows, *(1 for _ in rest))
        apart = [graph.add("Unsqueeze", times.outputs[value], graph.whole(1)) for value in values]
        tables = [graph.add("Expand", each, repeated) for each in apart]
        inside = [f"{name}/{value}" for value in values]
        if len(values) == 1 or not rest:
            for table, value in zip(tables, inside, strict=True):
                body.add("Gather", table, ROUND, to=value, axis=0)
        else:
            row = body.add("Gather", graph.joined(*tables, axis=2), ROUND, axis=0)
            body.split(row, inside, axis=1)
    return {value: f"{name}/{value}" for value in found.time_values}
