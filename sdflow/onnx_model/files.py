"""The canonical form of ONNX models that all passes write: `model.onnx` and, for large tensors, `model.onnx.data`.

Equal graphs must have equal bytes, so irrelevant data (producer, doc strings, locations in Olive's or torch's code) is
removed, and tensors are in one file in graph order.
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
"""Smaller initializers (in bytes) stay in the graph file."""

COPY_BLOCK = 1 << 24


def store_model(model_path: Path, out: Path) -> None:
    """Write the model at `model_path`, with its external data, to `out` in canonical form. Consumes `model_path`.

    A data file already in canonical form is moved, any other is streamed with one tensor in memory at a time.
    Raises PassError if external data is missing or too short.
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
    """Write a ModelProto to `out`, reading external tensors from the directory `folder`. Modifies `model`."""
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
    """Write only `model.onnx`, without metadata. Modifies `model`."""
    strip_metadata(model)
    (out / MODEL_FILE).write_bytes(model.SerializeToString(deterministic=True))


def strip_metadata(model: Any) -> None:
    """Remove irrelevant data (producer, doc strings, metadata), and sort opset imports and value infos."""
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
                tensor.ClearField("data_location")  # unset and "default" mean the same
        for node in graph.node:
            for attribute in node.attribute:
                attribute.ClearField("doc_string")
                # Whether exporters name a Constant's tensor depends on the model's size.
                for tensor in (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors:
                    tensor.ClearField("name")
        known = sorted(graph.value_info, key=lambda info: str(info.name))
        del graph.value_info[:]
        graph.value_info.extend(known)


def read_values(tensor: Any, folder: Path) -> Any:
    """Return a TensorProto's values as a numpy array; external ones are read from the directory `folder`."""
    import onnx

    return onnx.numpy_helper.to_array(tensor, str(folder))


def _clear(item: Any) -> None:
    item.ClearField("doc_string")
    item.ClearField("metadata_props")


def initializers_and_constants(model: Any) -> Iterator[tuple[Any, bool]]:
    """Yield every tensor of the model, and whether it may be external (initializers may, constants in attributes may
    not)."""
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
    """Whether a TensorProto's values are in another file."""
    import onnx

    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def data_span(tensor: Any) -> tuple[str, int, int | None]:
    """Return file name, offset and length of a tensor's external data, in bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = entries.get("length")
    return entries["location"], int(entries.get("offset", 0)), None if length is None else int(length)


def decode_errors() -> tuple[type[Exception], ...]:
    """Return protobuf's exceptions for invalid messages. Its Python implementation, which onnxruntime-extensions
    selects for the whole process and its children, also raises UnicodeDecodeError."""
    from google.protobuf.message import DecodeError

    return (DecodeError, UnicodeDecodeError)


def missing_data(model: Any, folder: Path) -> str | None:
    """Describe external data of a ModelProto that is missing or truncated; None if it is complete."""
    sizes: dict[str, int] = {}
    for tensor, _ in initializers_and_constants(model):
        if is_external(tensor):
            try:
                location, offset, length = data_span(tensor)
                end = offset + (tensor_bytes(tensor) if length is None else length)
            except (KeyError, ValueError, ArithmeticError) as error:
                return f"the location of the data of {tensor.name:.100} is missing: {error}"
            if Path(location).name != location:
                return f"the data of {tensor.name:.100} are outside its folder"
            if min(offset, end) < 0:
                return f"the data of {tensor.name:.100} start before the file's beginning"
            if location not in sizes:
                if not (folder / location).is_file():
                    return f"its data file {location} is missing"
                sizes[location] = (folder / location).stat().st_size
            if end > sizes[location]:
                return f"{tensor.name} ends at byte {end:,} of {location}, which has {sizes[location]:,}"
    return None


def _data_file_in_order(model: Any, folder: Path) -> Path | None:
    """Return the data file of a model in canonical form: one file, tensors in graph order, no gaps, no large inline
    values."""
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
    """Make a TensorProto refer to bytes of a file."""
    import onnx

    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _use_raw_data(tensor: Any) -> None:
    """Convert typed value fields to raw bytes, so that equal tensors are equal bytes."""
    import onnx

    if tensor.HasField("raw_data") or tensor.data_type in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED):
        return
    raw = onnx.numpy_helper.to_array(tensor)
    name, dims, data_type = tensor.name, list(tensor.dims), tensor.data_type
    fresh = onnx.numpy_helper.from_array(raw, name)
    if fresh.data_type != data_type or list(fresh.dims) != dims:
        return  # a packed type that numpy cannot represent
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
                raise PassError(f"{location} ends within tensor {tensor.name!r}", remedy="Rebuild the previous step.")
            stream.write(block)
            left -= len(block)


def raw_values(tensor: Any, folder: Path) -> bytes:
    """Return a TensorProto's raw bytes, wherever they are. Raises PassError if a file is too short."""
    if is_external(tensor):
        inline_values(tensor, folder, tensor_bytes(tensor))
    _use_raw_data(tensor)
    return bytes(tensor.raw_data)


def inline_values(tensor: Any, folder: Path, length: int) -> None:
    """Read the `length` bytes of an external TensorProto into it. Raises PassError if the file is too short."""
    location, offset, _ = data_span(tensor)
    with (folder / location).open("rb") as source:
        source.seek(offset)
        values = source.read(length)
    if len(values) != length:
        raise PassError(f"{location} ends within tensor {tensor.name!r}", remedy="Rebuild the previous step.")
    tensor.raw_data = values
    tensor.ClearField("data_location")
    del tensor.external_data[:]
