"""Compose a pipeline folder into one graph: token ids, latents and guidance scale to pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.artifact import MODEL_FILE
from sdflow.errors import PassError
from sdflow.export.builder import EXTENSIONS, EXTENSIONS_VERSION, Builder
from sdflow.export.conditions import (
    HEIGHT,
    PART,
    RUN,
    WIDTH,
    Traced,
    condition_names,
    read_outputs,
    trace_conditions,
)
from sdflow.export.inline import inlined
from sdflow.export.loop import COEFFICIENTS, LATENTS, NOISES, SCALE, Loop, add_loop
from sdflow.export.once import TIMESTEPS
from sdflow.export.pixels import add_checker, add_decoder
from sdflow.export.program_data import clip_table
from sdflow.export.schedule import Coefficients
from sdflow.export.source import Size, Source
from sdflow.export.tokenizer import add_tokenizer
from sdflow.models.ports import Sizes
from sdflow.onnx_model.files import data_span, is_external, set_external
from sdflow.onnx_model.nodes import refill
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.sessions.session import read_graph
from sdflow.runtime.sessions.specialize import specialize

if TYPE_CHECKING:
    import onnx

TEXTS = ("prompt", "negative_prompt")
IMAGES, FLAGS = "images", "nsfw_content_detected"


@dataclass(frozen=True)
class Form:
    """The graph's inputs. text: prompts as strings instead of token ids. guided: the guidance scale, and negative
    prompts.
    negative: whether these are inputs; otherwise the family's default is used. schedule: baked in, unless
    `open_schedule` makes its table and the noises inputs. size: the only one; None for any."""

    guided: bool
    negative: bool
    schedule: Coefficients
    open_schedule: bool
    text: bool = False
    size: Size | None = None

    @property
    def draws(self) -> bool:
        """Whether noises are an input."""
        return self.open_schedule or self.schedule.draws > 0


@dataclass(frozen=True)
class Composed:
    """A pipeline as one graph.

    model: a ModelProto. ids: its token id inputs -> the companion that makes them, and whether they are negative
    prompts'.
    lengths: companion -> tokens per text. templates: companion -> both halves of its chat template.
    """

    model: onnx.ModelProto
    ids: Mapping[str, tuple[str, bool]]
    lengths: Mapping[str, int]
    templates: Mapping[str, tuple[str, str]]


def compose(source: Source, form: Form, data_files: Mapping[str, str]) -> Composed:
    """Compose the whole pipeline into one graph. data_files: submodel -> name of its weight file next to the graph.

    Inputs, depending on the form: texts (images), or token ids (images, tokens) int32; latents (images, channels, rows,
    columns) and noises (draws, images, channels, rows, columns), standard normal, guidance_scale (1), timesteps (runs)
    and coefficients (runs + 1, terms), float32. Outputs: images (images, height, width, 3) in [0, 1]; with a checker,
    flags (images).
    Raises PassError for submodels with different opsets.
    """
    from onnx import helper

    family = source.family
    models = {name: read_part(source.folder / name / MODEL_FILE, data_files.get(name)) for name in source.submodels}
    opsets = common_opsets(models)
    latents = family.latents(source.configs)
    traced = trace_conditions(
        family,
        source.configs,
        source.companions,
        source.options,
        guided=form.guided,
        negative=form.negative,
        opset=opsets[""],
    )
    sizes = None
    if form.size is not None:
        axes = {**_axes(source, form.size, latents.scale), **traced.tokens}
        models[family.decoder] = specialize(models[family.decoder], {**axes, "batch": form.size.images})
        sizes = {**axes, "batch": (1 + form.guided) * form.size.images}
    graph = Builder("pipeline")
    if not form.open_schedule:
        graph.initializers += _baked(form.schedule)
    ids = _ids(graph, source, traced, text=form.text)
    conditions = add_conditions(graph, source, models, traced, {**_pixels(graph, latents.scale), **ids})
    denoiser = models[family.denoiser]
    (output,) = (item.name for item in denoiser.graph.output)
    ports = {name: family.part(name).ports(source.configs[name]) for name in source.submodels}
    moving = Moving.of(ports[family.denoiser])
    shape = () if form.size is None else (form.size.images, latents.channels, form.size.rows, form.size.columns)
    loop = Loop(
        denoiser,
        family.denoiser,
        moving,
        output,
        conditions,
        form.guided,
        form.draws,
        shape,
        sizes,
        family.guidance_offset,
    )
    result = add_loop(graph, loop)
    decoder = models[family.decoder]
    images = add_decoder(graph, decoder, family.decoder, ports[family.decoder], result, latents)
    outputs = {IMAGES: images}
    if (checker := family.checker) is not None and checker in source.submodels:
        reader = source.companions["feature_extractor"].to_dict()
        outputs[IMAGES], outputs[FLAGS] = add_checker(graph, models[checker], checker, ports[checker], images, reader)
    for name, value in outputs.items():
        graph.add("Identity", value, to=name)
    made = helper.make_graph(
        graph.nodes,
        "pipeline",
        _inputs(traced, form, latents.channels),
        _outputs(outputs, form.size, latents.scale),
        graph.initializers,
    )
    if form.text:
        opsets[EXTENSIONS] = EXTENSIONS_VERSION
    return Composed(model_of(made, opsets, models.values()), traced.ids, traced.lengths, traced.templates)


def model_of(graph: Any, opsets: Mapping[str, int], parts: Iterable[onnx.ModelProto]) -> onnx.ModelProto:
    """A model of a graph made of these submodels."""
    from onnx import helper

    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in sorted(opsets.items())],
        ir_version=max(model.ir_version for model in parts),
        producer_name="sdflow",
    )


def _axes(source: Source, size: Size, scale: int) -> dict[str, int]:
    """The submodels' axes by name, except `batch`."""
    axes = Sizes(1, size.rows * scale, size.columns * scale, scale).axes()
    return {**axes, **source.family.token_sizes(source.configs)}


def read_part(path: Path, data_file: str | None) -> onnx.ModelProto:
    """The graph of a submodel. data_file: name of its weight file."""
    model = read_graph(path)
    for tensor in model.graph.initializer:
        if is_external(tensor):
            assert data_file is not None, path
            _, offset, length = data_span(tensor)
            assert length is not None, path
            set_external(tensor, data_file, offset, length)
    return model


def common_opsets(models: Mapping[str, onnx.ModelProto]) -> dict[str, int]:
    """Operator domain -> version. Raises PassError if submodels differ."""
    found: dict[str, int] = {}
    of: dict[str, str] = {}
    for name, model in models.items():
        for entry in model.opset_import:
            domain = "" if entry.domain == "ai.onnx" else entry.domain
            if found.setdefault(domain, entry.version) != entry.version:
                raise PassError(
                    f"it has version {entry.version} of the operators {domain or 'of ONNX'}, {of[domain]} has {found[domain]}: "
                    "one graph has one version",
                    where=name,
                    remedy="Set one target_opset for all submodels in the workflow.",
                )
            of.setdefault(domain, name)
    return found


def _ids(graph: Builder, source: Source, traced: Traced, *, text: bool) -> dict[str, str]:
    """The token ids: inputs of the graph, or the outputs of its tokenizers."""
    if not text:
        return {name: name for name in traced.ids}
    return {
        name: add_tokenizer(graph, TEXTS[negative], clip_table(source.companions[companion], companion))
        for name, (companion, negative) in traced.ids.items()
    }


def _pixels(graph: Builder, scale: int) -> dict[str, str]:
    """Height and width of the image, from the latents' size."""
    sizes = {}
    for axis, name in ((2, HEIGHT), (3, WIDTH)):
        pixels = graph.add("Mul", graph.size(LATENTS, axis), graph.whole(scale))
        sizes[name] = graph.add("Squeeze", pixels, graph.whole(0))
    return sizes


def add_conditions(
    graph: Builder,
    source: Source,
    models: Mapping[str, onnx.ModelProto],
    traced: Traced,
    given: Mapping[str, str],
) -> dict[str, str]:
    """The denoiser's inputs other than latents and timestep -> values. given: token ids, and height and width in pixels
    -> values; the guidance scale is read by its own name."""
    given = {**given, SCALE: SCALE}
    names = condition_names(traced)
    if not reads_scale(traced):
        del given[SCALE]
        refill(traced.model.graph.input, (item for item in traced.model.graph.input if item.name != SCALE))
    part = inlined(traced.model, "conditions", given, names.values())
    graph.initializers.extend(part.initializers)
    for node in part.nodes:
        if node.op_type != RUN:
            graph.nodes.append(node)
            continue
        name = next(attribute.s.decode() for attribute in node.attribute if attribute.name == PART)
        outputs = read_outputs(source.family, name, source.configs[name])
        read = source.family.part(name).ports(source.configs[name]).inputs
        feeds = {port.name: value for port, value in zip(read, node.input, strict=True)}
        text = inlined(models[name], name, feeds, outputs)
        graph.nodes.extend(text.nodes)
        graph.initializers.extend(text.initializers)
        for output, value in zip(outputs, node.output, strict=True):
            if value:
                graph.add("Identity", text.outputs[output], to=value)
    return {name: part.outputs[output] for name, output in names.items()}


def reads_scale(traced: Traced) -> bool:
    """Whether the conditions depend on the guidance scale."""
    return any(SCALE in node.input for node in traced.model.graph.node)


def _baked(schedule: Coefficients) -> list[Any]:
    from onnx import numpy_helper

    return [
        numpy_helper.from_array(schedule.timesteps, TIMESTEPS),
        numpy_helper.from_array(schedule.table, COEFFICIENTS),
    ]


def _inputs(traced: Traced, form: Form, channels: int) -> list[Any]:
    from onnx import TensorProto, helper

    fixed: Mapping[str, int] = {} if form.size is None else asdict(form.size)

    def tensor(name: str, *axes: int | str, kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, [fixed.get(str(axis), axis) for axis in axes])

    shape = ("images", channels, "rows", "columns")
    found = []
    for item in traced.model.graph.input:
        if item.name in traced.ids and not form.text:
            tokens = item.type.tensor_type.shape.dim[1].dim_value
            found.append(tensor(item.name, "images", tokens, kind=TensorProto.INT32))
    if form.text:
        texts = {TEXTS[negative]: None for _, negative in traced.ids.values()}
        found += [tensor(name, "images", kind=TensorProto.STRING) for name in texts]
    found.append(tensor(LATENTS, *shape))
    if form.draws:
        found.append(tensor(NOISES, "draws" if form.open_schedule else form.schedule.draws, *shape))
    if form.guided or reads_scale(traced):
        found.append(tensor(SCALE, 1))
    if form.open_schedule:
        found += [tensor(TIMESTEPS, "runs"), tensor(COEFFICIENTS, "runs_and_result", "terms")]
    return found


def _outputs(names: Iterable[str], size: Size | None, scale: int) -> list[Any]:
    from onnx import TensorProto, helper

    count, height, width = (
        ("images", "height", "width") if size is None else (size.images, size.rows * scale, size.columns * scale)
    )
    kinds = {
        IMAGES: (TensorProto.FLOAT, [count, height, width, 3]),
        FLAGS: (TensorProto.BOOL, [count]),
    }
    return [helper.make_tensor_value_info(name, *kinds[name]) for name in names]
