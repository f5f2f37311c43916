"""A pipeline as separate graphs, for programs that run the steps themselves: text, denoiser, decoder, and checker.

All inputs and outputs are float32, whatever the computation uses, so that programs need no other floating-point type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.export.builder import Builder
from sdflow.export.compose import FLAGS, IMAGES, add_conditions, common_opsets, model_of, read_part, reads_scale
from sdflow.export.conditions import HEIGHT, WIDTH, Traced, trace_conditions
from sdflow.export.inline import inlined
from sdflow.export.loop import LATENTS, SCALE
from sdflow.export.pixels import add_checker, add_decoder
from sdflow.export.source import Source
from sdflow.models.ports import Ports
from sdflow.onnx_model.nodes import needed, read_by
from sdflow.runtime.denoiser.moving import Moving

TEXT, DENOISER, DECODER, CHECKER = "text", "denoiser", "decoder", "checker"
TIMESTEP, PREDICTION = "timestep", "prediction"


@dataclass(frozen=True)
class Parts:
    """The graphs of a pipeline exported in parts.

    models: name above -> ModelProto, whose external data is `SUBMODEL/model.onnx.data` of the pipeline folder.
    conditions: the text graph's outputs that the denoiser reads. traced: how prompts become these. guided: whether each
    has a row for the negative prompt first.
    """

    models: Mapping[str, Any]
    conditions: tuple[str, ...]
    traced: Traced
    guided: bool


def make_parts(source: Source, *, guided: bool) -> Parts:
    """The graphs, for one image at a time, of any size.

    text: token ids (1, tokens) int32, and if needed height and width, int64 scalars, and guidance_scale (1) ->
    conditions.
    denoiser: latents (rows, channels, rows, columns), timestep (1), conditions -> prediction. decoder: latents ->
    images (1, height, width, 3) in [0, 1]. checker: images -> images, flags (1). Raises PassError for text encoders
    with different opsets.
    """
    family, configs = source.family, source.configs
    models = {name: _read(source, name) for name in source.submodels}
    ports = {name: family.part(name).ports(configs[name]) for name in source.submodels}
    apart = {family.denoiser, family.decoder, family.checker}
    encoders = {name: model for name, model in models.items() if name not in apart}
    opsets = common_opsets(encoders)
    traced = trace_conditions(
        family,
        configs,
        source.companions,
        source.options,
        guided=guided,
        negative=True,
        opset=opsets[""],
    )
    text, conditions = _text(source, encoders, traced, rows=1 + guided)
    made = {TEXT: model_of(text, opsets, encoders.values())}
    latents, denoiser = family.latents(configs), models[family.denoiser]
    shape = ("batch", latents.channels, "rows", "columns")
    graph = _denoiser(denoiser, family.denoiser, Moving.of(ports[family.denoiser]), shape, conditions)
    made[DENOISER] = model_of(graph, common_opsets({family.denoiser: denoiser}), [denoiser])
    decoder = models[family.decoder]
    builder = Builder(DECODER)
    pixels = add_decoder(builder, decoder, family.decoder, ports[family.decoder], LATENTS, latents)
    builder.add("Identity", pixels, to=IMAGES)
    graph = _graph(builder, DECODER, [_floats(LATENTS, 1, *shape[1:])], [_floats(IMAGES, 1, "height", "width", 3)])
    made[DECODER] = model_of(graph, common_opsets({family.decoder: decoder}), [decoder])
    if (name := family.checker) is not None and name in models:
        graph = _checker(models[name], name, ports[name], source.companions["feature_extractor"].to_dict())
        made[CHECKER] = model_of(graph, common_opsets({name: models[name]}), [models[name]])
    return Parts(made, conditions, traced, guided)


def _read(source: Source, name: str) -> Any:
    there = (source.folder / name / WEIGHTS_FILE).is_file()
    return read_part(source.folder / name / MODEL_FILE, f"{name}/{WEIGHTS_FILE}" if there else None)


def _text(source: Source, encoders: Mapping[str, Any], traced: Traced, *, rows: int) -> tuple[Any, tuple[str, ...]]:
    """The text graph; each condition has `rows` rows."""
    from onnx import TensorProto, helper

    builder = Builder(TEXT)
    scaled = reads_scale(traced)
    given = {name: name for name in (HEIGHT, WIDTH, *traced.ids)}
    found = add_conditions(builder, source, encoders, traced, given)
    for name, value in found.items():
        rest = builder.add("Shape", value, start=1)
        builder.add("Expand", value, builder.joined(builder.whole(rows), rest), to=name)
    read = read_by(needed(builder.nodes, found))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT32, [1, traced.lengths[companion]])
        for name, (companion, _) in traced.ids.items()
    ]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, []) for name in (HEIGHT, WIDTH) if name in read]
    if scaled:
        inputs.append(_floats(SCALE, 1))
    outputs = [helper.make_value_info(name, helper.make_tensor_type_proto(TensorProto.FLOAT, None)) for name in found]
    builder.nodes = needed(builder.nodes, found)
    return _graph(builder, TEXT, inputs, outputs), tuple(found)


def _denoiser(model: Any, name: str, moving: Moving, shape: tuple[int | str, ...], conditions: tuple[str, ...]) -> Any:
    from onnx import TensorProto, helper

    builder = Builder(DENOISER)
    (output,) = (item.name for item in model.graph.output)
    given = {moving.latents: LATENTS, moving.timestep: TIMESTEP, **{each: each for each in conditions}}
    part = inlined(model, name, given, [output])
    builder.nodes, builder.initializers = part.nodes, part.initializers
    builder.add("Identity", part.outputs[output], to=PREDICTION)
    inputs = [_floats(LATENTS, *shape), _floats(TIMESTEP, 1)]
    axes = {item.name: len(item.type.tensor_type.shape.dim) for item in model.graph.input}
    inputs += [
        helper.make_tensor_value_info(
            each, TensorProto.FLOAT, ["batch", *(f"{each}_{axis}" for axis in range(1, axes[each]))]
        )
        for each in conditions
    ]
    return _graph(builder, DENOISER, inputs, [_floats(PREDICTION, *shape)])


def _checker(model: Any, name: str, ports: Ports, reader: Mapping[str, Any]) -> Any:
    from onnx import TensorProto, helper

    builder = Builder(CHECKER)
    seen = "pixels"
    checked, flags = add_checker(builder, model, name, ports, seen, reader)
    builder.add("Identity", checked, to=IMAGES)
    builder.add("Identity", flags, to=FLAGS)
    shape = (1, "height", "width", 3)
    outputs = [_floats(IMAGES, *shape), helper.make_tensor_value_info(FLAGS, TensorProto.BOOL, [1])]
    return _graph(builder, CHECKER, [_floats(seen, *shape)], outputs)


def _floats(name: str, *axes: int | str) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(axes))


def _graph(builder: Builder, name: str, inputs: list[Any], outputs: list[Any]) -> Any:
    from onnx import helper

    return helper.make_graph(builder.nodes, name, inputs, outputs, builder.initializers)
