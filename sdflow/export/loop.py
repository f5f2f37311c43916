"""The steps as an ONNX `Loop`: a scheduler's step is a product with a row of its table (`sdflow.export.schedule`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.export.builder import Builder
from sdflow.export.inline import inlined, parted
from sdflow.export.once import ROUND, TIMESTEPS, cut, time_rows
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.sessions.specialize import specialize

LATENTS, NOISES, SCALE = "latents", "noises", "guidance_scale"
COEFFICIENTS = "coefficients"
BODY = "denoising"


@dataclass(frozen=True)
class Loop:
    """The denoising loop to compose.

    model: the denoiser's ModelProto; moving, output: its names. conditions: its inputs other than latents and
    timestep -> values, with a row per image or one for all; with guidance the negative prompts' rows come first. draws:
    whether the scheduler draws noises. shape: of the latents, if fixed; sizes: then of all of the model's axes, which
    avoids shape arithmetic and repeated work per round (`sdflow.export.once`). offset: added to the guidance scale.
    """

    model: Any
    name: str
    moving: Moving
    output: str
    conditions: Mapping[str, str]
    guided: bool
    draws: bool
    shape: tuple[int, ...] = ()
    sizes: Mapping[str, int] | None = None
    offset: float = 0.0


def add_loop(graph: Builder, loop: Loop) -> str:
    """The final latents, shaped like `latents`. Reads `latents`, `timesteps`, `coefficients`, and depending on the loop
    `noises` and `guidance_scale`."""
    from onnx import TensorProto, helper

    shape = graph.add("Shape", LATENTS)
    images = graph.size(LATENTS, 0)
    count = graph.size(TIMESTEPS, 0)
    one_row = graph.whole(1, -1)
    values = graph.add("Reshape", LATENTS, one_row)
    columns = graph.size(values, 1)
    terms = [values]
    if loop.draws:
        draws = graph.size(NOISES, 0)
        terms.append(graph.add("Reshape", NOISES, graph.joined(draws, columns)))
        first = graph.add("Add", draws, graph.whole(1))
    else:
        first = graph.whole(1)
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
    terms.append(graph.add("ConstantOfShape", graph.joined(count, columns), value=zero))
    known = graph.joined(*terms)
    every = graph.add(
        "Range", graph.constant(0, "int64"), graph.add("Squeeze", graph.size(known, 0)), graph.constant(1, "int64")
    )
    places = graph.add("Reshape", graph.cast(every, TensorProto.INT32), graph.whole(-1, 1))
    if loop.guided:
        weight = graph.add("Add", SCALE, graph.constant(loop.offset, "float32")) if loop.offset else SCALE
        scale = graph.add("Max", weight, graph.constant(1.0, "float32"))  # no guidance up to 1
        rows = graph.add("Mul", images, graph.whole(2))
    else:
        scale, rows = "", images
    conditions = {name: _for_rows(graph, value, rows) for name, value in loop.conditions.items()}

    body = Builder(BODY)
    row = body.add("Gather", COEFFICIENTS, ROUND, axis=0)
    row = body.add("Reshape", row, body.whole(1, -1))
    sample = body.add("Reshape", body.add("MatMul", row, "terms"), body.whole(*loop.shape) if loop.shape else shape)
    found = None if loop.sizes is None else cut(loop.model, loop.sizes, moving=loop.moving, guided=loop.guided)
    if found is None:
        model = loop.model if loop.sizes is None else specialize(loop.model, loop.sizes)
        timestep = body.add("Reshape", body.add("Gather", TIMESTEPS, ROUND, axis=0), body.whole(1))
        latents = body.joined(sample, sample) if loop.guided else sample
        moving = {loop.moving.latents: latents, loop.moving.timestep: timestep}
    else:
        model = found.model
        moving = {loop.moving.latents: sample, **time_rows(graph, body, found, loop.name)}
    denoiser = inlined(model, loop.name, {**moving, **conditions}, [loop.output])
    parts = parted(denoiser, moving.values(), conditions.values())
    graph.nodes.extend(parts.before)
    graph.initializers.extend(parts.before_initializers)
    body.nodes.extend(parts.body)
    body.initializers.extend(parts.body_initializers)
    output = denoiser.outputs[loop.output]
    if loop.guided:
        axis = [0]
        half = body.whole(loop.shape[0]) if loop.shape else images
        negative = body.part(output, [0], half, axis)
        positive = body.part(output, half, [1 << 62], axis)
        output = body.add("Add", negative, body.add("Mul", scale, body.add("Sub", positive, negative)))
    place = body.add("Add", body.add("Reshape", ROUND, body.whole(1)), first)
    output = body.add("Reshape", output, one_row)
    # Uses a comparison: the CUDA provider's ScatterND copies a row with one thread, which takes 0.6 ms per step.
    here = body.add("Equal", places, body.cast(place, TensorProto.INT32))
    body.add("Where", here, output, "terms", to="more_terms")
    body.add("Identity", "go_on", to="still_going_on")

    rounds = graph.add("Squeeze", count, graph.whole(0))
    inner = helper.make_graph(
        body.nodes,
        BODY,
        [
            helper.make_tensor_value_info(ROUND, TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("terms", TensorProto.FLOAT, ["term", "value"]),
        ],
        [
            helper.make_tensor_value_info("still_going_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("more_terms", TensorProto.FLOAT, ["term", "value"]),
        ],
        body.initializers,
    )
    all_terms = graph.add("Loop", rounds, graph.constant(True, "bool"), known, body=inner)
    last = graph.add("Gather", COEFFICIENTS, count, axis=0)
    return graph.add("Reshape", graph.add("MatMul", last, all_terms), shape)


def _for_rows(graph: Builder, value: str, rows: str) -> str:
    """Expand a value with one row to this many."""
    rest = graph.add("Shape", value, start=1)
    return graph.add("Expand", value, graph.joined(rows, rest))
