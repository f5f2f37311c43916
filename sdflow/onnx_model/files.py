"""The one form in which every pass leaves its ONNX model: `model.onnx` and, for large tensors, `model.onnx.data`.

Equal graphs must be equal bytes, so what changes nothing in a model (who produced it, doc strings, where Olive or torch
found a node) is removed, and tensors lie in one file in the order of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.errors import PassError
from sdflow.onnx_model.facts import subgraphs, tensor_bytes
from sdflow.onnx_model.stub import is_stub

INLINE_BELOW = 1024
"""Initializers of fewer bytes stay in the graph file."""

COPY_BLOCK = 1 << 24


def store_model(model_path: Path, out: Path) -> None:
    """Write the model at `model_path`, with its external data, to `out` in the form above. `model_path` is used up.

    A data file that already has that form is moved, any other is streamed: memory is bounded by one tensor.
    Raises PassError when external data is missing or shorter than the graph says.
    """
    import onnx

    model = onnx.load(str(model_path), load_external_data=False)
    data_file = _data_file_in_order(model, model_path.parent)
    if data_file is not None:
        _set_location(model)
        data_file.replace(out / WEIGHTS_FILE)
        write_graph(model, out)
    else:
        store_proto(model, model_path.parent, out)


def store_proto(model: Any, folder: Path, out: Path) -> None:
    """Write a ModelProto to `out`; tensors that are external are read from the directory `folder`. Changes `model`."""
    weights = out / WEIGHTS_FILE
    offset = 0
    with weights.open("wb") as stream:
        for tensor, movable in initializers_and_constants(model):
            if is_stub(tensor):
                continue
            if not is_external(tensor):
                _use_raw_data(tensor)
            length = tensor_bytes(tensor)
            if movable and length >= INLINE_BELOW:
                _copy_values(tensor, folder, stream, length)
                set_external(tensor, WEIGHTS_FILE, offset, length)
                offset += length
            elif is_external(tensor):
                inline_values(tensor, folder, length)
    if offset == 0:
        weights.unlink()
    write_graph(model, out)


def write_graph(model: Any, out: Path) -> None:
    """Write `model.onnx` alone, without metadata. Changes `model`."""
    strip_metadata(model)
    (out / MODEL_FILE).write_bytes(model.SerializeToString(deterministic=True))


def strip_metadata(model: Any) -> None:
    """Remove what changes nothing: producer, doc strings, metadata. The order of operator sets is made the same."""
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "metadata_props"):
        model.ClearField(name)
    opsets = sorted((entry.domain, entry.version) for entry in model.opset_import)
    del model.opset_import[:]
    for domain, version in opsets:
        model.opset_import.add(domain=domain, version=version)
    for graph in subgraphs(model.graph):
        _clear(graph)
        for item in (*graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
            _clear(item)
        for tensor in graph.initializer:
            if not is_external(tensor):
                tensor.ClearField("data_location")  # Unset and "default" mean the same.
        for node in graph.node:
            for attribute in node.attribute:
                attribute.ClearField("doc_string")
                # Exporters give a Constant's tensor a name or none, by the size of the model.
                for tensor in (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors:
                    tensor.ClearField("name")
        known = sorted(graph.value_info, key=lambda info: str(info.name))
        del graph.value_info[:]
        graph.value_info.extend(known)


def read_values(tensor: Any, folder: Path) -> Any:
    """The values of a TensorProto as a numpy array; external ones are read from the directory `folder`."""
    import onnx

    return onnx.numpy_helper.to_array(tensor, str(folder))


def _clear(item: Any) -> None:
    item.ClearField("doc_string")
    item.ClearField("metadata_props")


def initializers_and_constants(model: Any) -> Iterator[tuple[Any, bool]]:
    """Every tensor of the model, and whether it may be external (initializers; constants in attributes stay)."""
    for graph in subgraphs(model.graph):
        for tensor in graph.initializer:
            yield tensor, True
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t, False
                for tensor in attribute.tensors:
                    yield tensor, False


def is_external(tensor: Any) -> bool:
    """Whether the values of a TensorProto lie in another file."""
    import onnx

    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def data_span(tensor: Any) -> tuple[str, int, int | None]:
    """File name, offset and length of a tensor's external data, in bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = entries.get("length")
    return entries["location"], int(entries.get("offset", 0)), None if length is None else int(length)


def decode_errors() -> tuple[type[Exception], ...]:
    """What protobuf raises for bytes that are no message. Its implementation in Python, which onnxruntime-extensions chooses
    for the whole process and those that it starts, raises UnicodeDecodeError too."""
    from google.protobuf.message import DecodeError

    return (DecodeError, UnicodeDecodeError)


def missing_data(model: Any, folder: Path) -> str | None:
    """What external data of a ModelProto is missing in its folder or cut off, in words; None when all is there."""
    sizes: dict[str, int] = {}
    for tensor, _ in initializers_and_constants(model):
        if is_external(tensor):
            try:
                location, offset, length = data_span(tensor)
                end = offset + (tensor_bytes(tensor) if length is None else length)
            except (KeyError, ValueError, ArithmeticError) as error:
                return f"where the data of {tensor.name:.100} lie is not said: {error}"
            if Path(location).name != location:
                return f"the data of {tensor.name:.100} lie outside its folder"
            if min(offset, end) < 0:
                return f"the data of {tensor.name:.100} begin before their file"
            if location not in sizes:
                if not (folder / location).is_file():
                    return f"its data file {location} is missing"
                sizes[location] = (folder / location).stat().st_size
            if end > sizes[location]:
                return f"{tensor.name} ends at byte {end:,} of {location}, which has {sizes[location]:,}"
    return None


def _data_file_in_order(model: Any, folder: Path) -> Path | None:
    """The data file of a model that needs no rewriting: one file, tensors in graph order, no gaps, none inline."""
    end = 0
    locations = set()
    for tensor, movable in initializers_and_constants(model):
        length = tensor_bytes(tensor)
        if is_stub(tensor):
            return None
        if is_external(tensor):
            location, offset, stored = data_span(tensor)
            if (
                Path(location).is_absolute()
                or not movable
                or offset != end
                or stored != length
                or length < INLINE_BELOW
            ):
                return None
            locations.add(location)
            end += length
        elif (movable and length >= INLINE_BELOW) or (length and not tensor.HasField("raw_data")):
            return None
    if len(locations) != 1:
        return None
    data_file = folder / locations.pop()
    return data_file if data_file.is_file() and data_file.stat().st_size == end else None


def _set_location(model: Any) -> None:
    for tensor, _ in initializers_and_constants(model):
        if is_external(tensor):
            _, offset, length = data_span(tensor)
            set_external(tensor, WEIGHTS_FILE, offset, length or 0)


def set_external(tensor: Any, location: str, offset: int, length: int) -> None:
    """Make a TensorProto a reference to bytes of a file."""
    import onnx

    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _use_raw_data(tensor: Any) -> None:
    """Values may be stored in typed fields or as raw bytes; one form, so that equal tensors are equal bytes."""
    import onnx

    if tensor.HasField("raw_data") or tensor.data_type in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED):
        return
    raw = onnx.numpy_helper.to_array(tensor)
    name, dims, data_type = tensor.name, list(tensor.dims), tensor.data_type
    fresh = onnx.numpy_helper.from_array(raw, name)
    if fresh.data_type != data_type or list(fresh.dims) != dims:
        return  # A packed type that numpy cannot hold: it stays as it is.
    tensor.CopyFrom(fresh)


def _copy_values(tensor: Any, folder: Path, stream: IO[bytes], length: int) -> None:
    if not is_external(tensor):
        stream.write(tensor.raw_data)
        return
    location, offset, _ = data_span(tensor)
    with (folder / location).open("rb") as source:
        source.seek(offset)
        left = length
        while left:
            block = source.read(min(left, COPY_BLOCK))
            if not block:
                raise PassError(f"{location} ends within tensor {tensor.name!r}", remedy="Build the step before again.")
            stream.write(block)
            left -= len(block)


def raw_values(tensor: Any, folder: Path) -> bytes:
    """The raw bytes of a TensorProto, wherever they are. Raises PassError when a file is too short."""
    if is_external(tensor):
        inline_values(tensor, folder, tensor_bytes(tensor))
    _use_raw_data(tensor)
    return bytes(tensor.raw_data)


def inline_values(tensor: Any, folder: Path, length: int) -> None:
    """Read the `length` bytes of an external TensorProto into it. Raises PassError when the file is too short."""
    location, offset, _ = data_span(tensor)
    with (folder / location).open("rb") as source:
        source.seek(offset)
        values = source.read(length)
    if len(values) != length:
        raise PassError(f"{location} ends within tensor {tensor.name!r}", remedy="Build the step before again.")
    tensor.raw_data = values
    tensor.ClearField("data_location")
    del tensor.external_data[:]
