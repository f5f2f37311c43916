"""`sdflow export --one-file`: the graph, and each submodel's weights in a separate file next to it.

Weights are not changed: the files are copies of the artifacts' (sharing blocks where the file system can).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.artifact import WEIGHTS_FILE
from sdflow.build.assemble import copy_file
from sdflow.disk.atomic_write import replacing_all
from sdflow.errors import CacheError, UsageError, os_errors_as
from sdflow.export.compose import Form, compose
from sdflow.export.loop import SCALE
from sdflow.export.program_data import FORMAT_VERSION, compact, tokenizer_tables
from sdflow.export.schedule import Coefficients, coefficients
from sdflow.export.source import Size, guidance_of, latents_data, left_out, open_source
from sdflow.families.shared.latents import Latents
from sdflow.onnx_model.files import data_span, initializers_and_constants, is_external
from sdflow.runtime.denoiser.start import require_size
from sdflow.runtime.files.folder import SCHEDULER, folder_defaults, folder_family, folder_latents, load_companions
from sdflow.units import spell_bytes

MOST_IMAGES = 1024
"""Maximum batch size of a fixed-size graph."""
EMBEDDED = 2_000_000_000
"""Maximum bytes of weights within a graph: protobuf messages end at 2 GiB."""


@dataclass(frozen=True)
class Wanted:
    """Options of the exported graph.

    scheduler: by name; default: the pipeline's. steps, guidance_scale: default: the pipeline's; a scale up to 1 makes a
    graph without guidance. negative: token ids of negative prompts are an input. open_schedule: the scheduler's table
    is an input. checker: include the safety checker if the pipeline has one. text: include the tokenizers. height,
    width, images: fix the size; the missing ones default to the native size and one image. Without any, the graph
    generates all sizes. embed: store the weights in the graph, up to EMBEDDED bytes.
    """

    scheduler: str | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    negative: bool = True
    open_schedule: bool = False
    checker: bool = True
    text: bool = False
    height: int | None = None
    width: int | None = None
    images: int | None = None
    embed: bool = False


@dataclass(frozen=True)
class Exported:
    """An exported graph.

    files: the graph, weights, and the JSON that describes it -> bytes. inputs, outputs: the graph's, with types and
    shapes.
    left_out: parts of `sdflow generate` that the export lacks, with the equivalent option.
    """

    files: Mapping[Path, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    schedule: Coefficients
    left_out: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def folder_schedule(folder: Path, wanted: Wanted) -> Coefficients:
    """The table of a pipeline folder's scheduler. Raises UsageError like `coefficients`."""
    scheduler = load_companions(folder)[SCHEDULER]
    own, what = folder_defaults(folder)["text"], folder_latents(folder)
    steps = own.steps if wanted.steps is None else wanted.steps
    size = _size(wanted, what)
    tokens = None if size is None else what.tokens(size.rows, size.columns)
    return coefficients(folder_family(folder), scheduler, wanted.scheduler, steps, own.eta, scheduler.config, tokens)


def export_one_file(folder: Path, out: Path, wanted: Wanted) -> Exported:
    """Write the pipeline of a folder as one graph.

    Raises UsageError for a pipeline that needs more than text, CacheError if it cannot be written. Existing files then
    stay unchanged.
    """
    source = open_source(folder, out.parent, checker=wanted.checker)
    family, configs, there = source.family, source.configs, source.submodels
    scale = guidance_of(folder, wanted.guidance_scale)
    schedule = folder_schedule(folder, wanted)
    size = _size(wanted, family.latents(configs))
    form = Form(family.guided(configs, scale), wanted.negative, schedule, wanted.open_schedule, wanted.text, size)
    data = {
        name: out.with_name(f"{out.stem}.{name}.data") for name in there if (folder / name / WEIGHTS_FILE).is_file()
    }
    composed = compose(source, form, {name: path.name for name, path in data.items()})
    model, program_file = composed.model, out.with_name(f"{out.name}.json")
    if wanted.embed:
        _embed(model, {path.name: folder / name / WEIGHTS_FILE for name, path in data.items()})
        data = {}
    inputs, outputs = (tuple(map(_described, items)) for items in (model.graph.input, model.graph.output))
    program_data = {
        "format_version": FORMAT_VERSION,
        "graph": out.name,
        "data": [path.name for path in data.values()],
        "latents": latents_data(family.latents(configs), size),
        "guidance_scale": scale if SCALE in [item.name for item in model.graph.input] else None,
        "schedule": schedule.to_json(),
        "tokenizers": tokenizer_tables(source.companions, composed.ids, composed.lengths, composed.templates),
    }
    contents = {out: model.SerializeToString(deterministic=True), program_file: compact(program_data)}
    with (
        os_errors_as("cannot be written", out, "Free space or fix the permissions, then run again.", CacheError),
        replacing_all([*contents, *data.values()]) as written,
    ):
        for name, path in data.items():
            copy_file(folder / name / WEIGHTS_FILE, written[path])
        for path, content in contents.items():
            written[path].write_bytes(content)
        files = {path: written[path].stat().st_size for path in (out, *data.values(), program_file)}
    return Exported(files, inputs, outputs, schedule, left_out(folder))


def _embed(model: Any, files: Mapping[str, Path]) -> None:
    """Store the weights in the graph. files: by their names in it. Raises UsageError for too many."""
    if (size := sum(path.stat().st_size for path in files.values())) > EMBEDDED:
        raise UsageError(
            f"the weights take {spell_bytes(size)}, but a graph holds at most {spell_bytes(EMBEDDED)}",
            where="--embed",
            remedy="Leave it out: the weights then go into files next to the graph.",
        )
    opened = {name: path.read_bytes() for name, path in files.items()}
    for tensor, _ in initializers_and_constants(model):
        if is_external(tensor):
            name, offset, length = data_span(tensor)
            assert length is not None, "as compose writes them"
            tensor.raw_data = opened[name][offset : offset + length]
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")


def _size(wanted: Wanted, what: Latents) -> Size | None:
    """The fixed size, if any. Raises UsageError for a size that the model does not support."""
    if wanted.height is None and wanted.width is None and wanted.images is None:
        return None
    height, width = (what.image_size if each is None else each for each in (wanted.height, wanted.width))
    require_size(what.granularity, height, width)
    images = 1 if wanted.images is None else wanted.images
    if not 1 <= images <= MOST_IMAGES:
        raise UsageError(f"{images:,} images were requested", where="--images", remedy=f"Use 1 to {MOST_IMAGES:,}.")
    return Size(images, height // what.scale, width // what.scale)


def _described(value: Any) -> str:
    from onnx import TensorProto

    kind = value.type.tensor_type
    axes = ", ".join(axis.dim_param or str(axis.dim_value) for axis in kind.shape.dim)
    return f"{value.name} {TensorProto.DataType.Name(kind.elem_type).lower()} ({axes})"
