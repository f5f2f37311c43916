"""Check the promises of a pipeline folder's submodels: files, digests, external weights, names and types.
`sdflow.verify.folder` compares the other files.

Nothing is run. Every file is read once for its digest, except weights that were compared; weights are not loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sdflow.artifact import CONFIG_FILE, MODEL_FILE, WEIGHTS_FILE
from sdflow.digest import digest_file, digest_tree
from sdflow.disk.input_file import read_json
from sdflow.errors import PassError, UsageError
from sdflow.families import FAMILIES
from sdflow.families.shared.base import Family
from sdflow.families.shared.part import Part
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.manifest import Part as Built
from sdflow.models.ports import Port
from sdflow.onnx_model.facts import dtype_name, tensor_bytes
from sdflow.onnx_model.files import data_span, decode_errors, initializers_and_constants, is_external
from sdflow.onnx_model.reading import load_graph
from sdflow.onnx_model.stub import is_stub
from sdflow.runtime.files.folder import submodel_config
from sdflow.targets import Target, find_target
from sdflow.verify.artifact.element_types import STANDARD
from sdflow.verify.finding import Finding, Level
from sdflow.verify.kernels import kernel_table

PAGE, LARGEST_GAP = 1 << 12, 1 << 16
"""Writers of external data align tensors to pages of 4 to 64 KiB, which explains a gap before a tensor."""

REBUILD = "build the pipeline again: sdflow run"
OTHER_BYTES = "holds other bytes than were built"

PortTypes = dict[str, tuple[dict[str, str], dict[str, str]]]
"""Submodel -> its inputs and the outputs used for generating: name -> type."""


def check_promises(
    folder: Path,
    target: Target | None = None,
    *,
    family: Family | None = None,
    compared: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
    """Check the submodels of a pipeline folder. target, family: default to the manifest's. compared: submodels whose
    weights were all found to be the checkpoint's -> the known digest of their files. If it is the manifest's, the weights
    are not read again.

    Raises UsageError if the folder is not an sdflow pipeline.
    """
    manifest = read_manifest(folder)
    target = target or find_target(manifest.origin.target, str(folder / MANIFEST_FILE))
    family = family or FAMILIES[manifest.origin.family]
    found: list[Finding] = []
    port_types: PortTypes = {}
    for submodel, part in sorted(manifest.parts.items()):
        intact = WEIGHTS_FILE if compared.get(submodel) == part.artifact else None
        found += _files(folder / submodel, submodel, part, intact)
        if not family.ordered([submodel]):
            what = f"{family.title} has no such submodel"
            found.append(Finding(submodel, "component", "error", submodel, what, "Build the pipeline again."))
            continue
        found += _check_graph(folder / submodel, family.part(submodel), target, port_types)
    return [*found, *_one_type(family, port_types)]


def read_configs(folder: Path, submodels: Iterable[str]) -> dict[str, Any]:
    """The readable config.json of each submodel; `_check_graph` reports broken ones."""
    found = {}
    for name in submodels:
        with suppress(UsageError):
            found[name] = submodel_config(folder, name)
    return found


def _files(folder: Path, submodel: str, part: Built, intact: str | None) -> Iterator[Finding]:
    """Compare a submodel's files with the manifest: none missing, none extra, none changed. intact: a file that is known
    to have its digest."""

    def error(check: str, name: str, what: str) -> Finding:
        return Finding(submodel, check, "error", name, what, REBUILD)

    entries = part.files
    if digest_tree(entries) != part.artifact:
        yield error("digest", MANIFEST_FILE, f"its list of files does not match artifact {part.artifact[:12]}")
    place = folder.resolve()
    linked = place.parent.name if place.name == "files" else part.artifact
    if linked != part.artifact:
        yield error("stale", "", f"links to artifact {linked[:12]}, but {part.artifact[:12]} was built")
    changed: list[str] = []
    for entry in entries:
        path = folder / entry.path
        if not path.is_file():
            yield error("missing", entry.path, "is missing")
        elif (size := path.stat().st_size) < entry.size and entry.path != MODEL_FILE:
            yield error("digest", entry.path, f"is cut off: {size:,} of {entry.size:,} bytes")
        elif size != entry.size or (entry.path != intact and digest_file(path) != entry.sha256):
            changed.append(entry.path)
    for name in changed:
        if name == MODEL_FILE and WEIGHTS_FILE not in changed:
            yield error("stale", name, f"is not the graph built with these weights ({WEIGHTS_FILE} is)")
        elif name == WEIGHTS_FILE and MODEL_FILE not in changed:
            yield error("digest", name, f"{OTHER_BYTES}: damaged, or weights of another {MODEL_FILE}")
        else:
            yield error("digest", name, OTHER_BYTES)
    known = {entry.path for entry in entries}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known:
            yield Finding(submodel, "unused", "error", name, "is not part of what was built", "remove it")


# The graph and its external data


def _check_graph(folder: Path, part: Part, target: Target, port_types: PortTypes) -> list[Finding]:
    """Check a submodel's model.onnx: versions, external data, inputs and outputs.

    port_types: receives the types of inputs and outputs that are not exact.
    """
    submodel = part.name
    try:
        model = load_graph(folder / MODEL_FILE)
    except FileNotFoundError:
        return [Finding(submodel, "missing", "error", MODEL_FILE, "is missing", REBUILD)]
    except OSError as error:
        return [Finding(submodel, "digest", "error", MODEL_FILE, f"cannot be read ({error.strerror})", REBUILD)]
    except decode_errors() as error:
        return [Finding(submodel, "digest", "error", MODEL_FILE, f"is not an ONNX model ({error})", REBUILD)]
    found = [*_versions(model, submodel, target), *_external_data(model, folder, submodel)]
    try:
        config = read_json(folder / CONFIG_FILE)
        io = part.ports(config)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, PassError) as error:
        return [*found, Finding(submodel, "ports", "error", CONFIG_FILE, f"does not describe it ({error})", REBUILD)]
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in initializers]
    found += _ports(submodel, "input", inputs, io.inputs)
    found += _ports(submodel, "output", list(model.graph.output), io.outputs)
    read = None if part.read is None else part.read(config)
    exact = {port.name for port in (*io.inputs, *io.outputs) if port.exact}
    outputs = {info.name: _type(info) for info in model.graph.output if read is None or info.name in read}
    port_types[submodel] = {info.name: _type(info) for info in inputs if info.name not in exact}, outputs
    return found


def _versions(model: Any, submodel: str, target: Target) -> Iterator[Finding]:
    """Compare opsets and IR version with what the target's runtimes load; the preferred provider decides."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in STANDARD), default=0)
    for rank, (provider, _, _) in enumerate(target.providers):
        table = kernel_table(provider)
        level: Level = "warning" if rank else "error"
        if opset > table.opset:
            what = f"is of opset {opset}; {table.version} loads up to {table.opset}"
            yield Finding(submodel, "opset", level, MODEL_FILE, what, f"set target_opset: {table.opset} or less")
        if model.ir_version > table.ir_version:
            what = f"is of IR version {model.ir_version}; {table.version} loads up to {table.ir_version}"
            yield Finding(submodel, "opset", level, MODEL_FILE, what, "save it with an older onnx")


def _external_data(model: Any, folder: Path, submodel: str) -> Iterator[Finding]:
    """Check that external tensors lie inside their files, do not overlap, and cover every byte."""

    def error(name: str, what: str) -> Finding:
        return Finding(submodel, "external-data", "error", name, what, REBUILD)

    files: dict[str, list[tuple[int, int, str]]] = {}
    for tensor, _ in initializers_and_constants(model):
        if is_stub(tensor):
            yield error(tensor.name, "has a recipe but no values: this is a structure without weights")
        elif is_external(tensor):
            location, offset, length = data_span(tensor)
            wanted = tensor_bytes(tensor)
            if length not in (None, wanted):
                yield error(tensor.name, f"has {length:,} bytes of external data; its shape and type need {wanted:,}")
            files.setdefault(location, []).append((offset, offset + wanted, tensor.name))
    for location, spans in files.items():
        path = folder / location
        if Path(location).is_absolute() or ".." in Path(location).parts:
            yield error(location, "lies outside the model's folder: no runtime loads external data from there")
        elif not path.is_file():
            yield error(location, f"is missing: {len(spans)} tensors lie in it")
        else:
            yield from _layout(sorted(spans), path.stat().st_size, location, error)
    if WEIGHTS_FILE not in files and (folder / WEIGHTS_FILE).exists():
        yield error(WEIGHTS_FILE, "no tensor lies in it")


def _layout(spans: list[tuple[int, int, str]], size: int, location: str, error: Any) -> Iterator[Finding]:
    end, before = 0, ""
    for first, last, name in spans:
        if last > size:
            yield error(name, f"ends at byte {last:,} of {location}, which has {size:,}")
        if first < end:
            yield error(name, f"overlaps {before} in {location}, at byte {first:,}")
        elif first - end >= (LARGEST_GAP if first % PAGE == 0 else 1):
            yield error(location, f"{first - end:,} bytes before {name} belong to no tensor")
        if last > end:
            end, before = last, name
    if size > end:
        yield error(location, f"its last {size - end:,} bytes belong to no tensor")


# Inputs and outputs


def _ports(submodel: str, kind: str, infos: list[Any], ports: tuple[Port, ...]) -> Iterator[Finding]:
    def error(node: str, what: str) -> Finding:
        return Finding(submodel, "ports", "error", node, what, "leave the names and types to OnnxConversion")

    have, want = [info.name for info in infos], [port.name for port in ports]
    unknown = [name for name in have if name not in want]
    for name in want:
        if name not in have:
            hint = f" (there is {', '.join(unknown)})" if unknown else ""
            yield error(name, f"the {kind} is missing{hint}; diffusers uses it")
    if set(want) <= set(have):
        yield from (error(name, f"is an {kind} that diffusers does not know") for name in unknown)
    if have != want and sorted(have) == sorted(want):
        yield error(have[0], f"the {kind}s are {', '.join(have)}; expected {', '.join(want)}")
    known = {port.name: port for port in ports}
    for info in infos:
        if info.name in known:
            yield from _port(submodel, kind, info, known[info.name])


def _port(submodel: str, kind: str, info: Any, port: Port) -> Iterator[Finding]:
    """Floating-point ports may be float16 unless their values must be exact; integers match what is fed."""

    def error(what: str, remedy: str = REBUILD) -> Finding:
        return Finding(submodel, "ports", "error", info.name, what, remedy)

    found = _type(info)
    halved = port.dtype == "float32" and not port.exact
    if found != port.dtype and not (halved and found == "float16"):
        allowed = f"{port.dtype} or float16" if halved else port.dtype
        remedy = port.why_exact or (
            "diffusers feeds int32; set input_int32: true, or leave OnnxConversion's type"
            if port.dtype == "int32"
            else "leave the types to OnnxConversion and OnnxFloatToFloat16"
        )
        yield error(f"the {kind} is {found}, not {allowed}", remedy)
    dims = list(info.type.tensor_type.shape.dim)
    if len(dims) != len(port.axes):
        yield error(f"the {kind} has {len(dims)} axes, not {len(port.axes)}")
        return
    for index, (dim, axis) in enumerate(zip(dims, port.axes, strict=True)):
        if isinstance(axis, int) and dim.HasField("dim_value") and dim.dim_value != axis:
            yield error(f"axis {index} of the {kind} has size {dim.dim_value}, not {axis}")
        elif isinstance(axis, str) and dim.dim_param and dim.dim_param != axis:
            what = f"axis {index} of the {kind} is named {dim.dim_param}, not {axis}"
            yield replace(error(what, "sizes are fixed by these names"), level="warning")


def _type(info: Any) -> str:
    return dtype_name(info.type.tensor_type.elem_type)


def _one_type(family: Family, types: PortTypes) -> Iterator[Finding]:
    """diffusers creates latents in the type of the text encoders' output, and passes latents and embeddings between
    submodels without a cast."""
    none: tuple[dict[str, str], dict[str, str]] = ({}, {})
    inputs, outputs = ({name: types.get(name, none)[side] for name in family.drawing_of(types)} for side in (0, 1))
    passed = [(name, outputs[name]) for name in family.text_of(types)]
    # The denoiser's text inputs follow the latents.
    passed += [
        (family.denoiser, dict(reversed(inputs[family.denoiser].items()))),
        (family.denoiser, outputs[family.denoiser]),
    ]
    passed += [(family.decoder, inputs[family.decoder])]
    known = [
        (submodel, name, found)
        for submodel, ports in passed
        for name, found in ports.items()
        if found in ("float32", "float16")
    ]
    for submodel, name, found in known[1:]:
        if found != known[0][2]:
            first = f"{known[0][0]}'s {known[0][1]}"
            what = f"is {found} and {first} is {known[0][2]}: diffusers passes one to the other without a cast"
            remedy = "convert both to float16, or neither; or keep_io_types: true for both"
            yield Finding(submodel, "ports", "warning", name, what, remedy)
            return
