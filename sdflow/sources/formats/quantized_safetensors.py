"""Safetensors files: plain ones, float8 ones, and ComfyUI's quantized ones, with scales next to the weights.

Quantized layers are described in one of four ways, read as ComfyUI does (Comfy-Org/ComfyUI, comfy/utils.py,
`convert_old_quants`, and comfy/ops.py, `_load_quantized_module`):

- `_quantization_metadata` in the header: JSON with `layers`, a map from a layer to its description;
- `LAYER.comfy_quant`: the description as JSON in a uint8 tensor ("comfy_quant");
- a tensor `scaled_fp8` and `LAYER.scale_weight` ("fp8_scaled");
- only a scale next to a float8 weight.

Descriptions name a format. Supported are `float8_e4m3fn` and `float8_e5m2` (the weight is value x `weight_scale`) and
`int8_tensorwise` (the same with one scale, or one per row; with `convrot` the rows are rotated, too), after
comfy-kitchen 0.2.40 (Apache-2.0): `dequantize_per_tensor_fp8`, `dequantize_int8_simple`,
`dequantize_int8_convrot_weight`. Its other formats (nvfp4, mxfp8, convrot_w4a4, asym_w4a8_int8, awq_w4a16) are rejected
by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.disk.input_file import parse_json
from sdflow.errors import CheckpointError
from sdflow.sources.formats.mapped import STEP, mapped, row_range
from sdflow.sources.formats.plain import FLOAT8, PlainTensor, float8_values
from sdflow.sources.formats.refused import refused_format
from sdflow.sources.formats.stored import ALL, Refusal, StoredTensor, WeightsFile
from sdflow.sources.safetensors_file import TensorEntry, float_values, read_entry, read_header, read_metadata

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT8_ALONE = "float8"
"""Format name of float8 weights without scales."""
_FLOAT8_FORMATS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_INT8_FORMAT = "int8_tensorwise"
_METADATA = "_quantization_metadata"
_DESCRIPTION = "comfy_quant"
_MARKER = "scaled_fp8"
_SCALES = ("weight_scale", "scale_weight")
_OF_INPUTS = ("input_scale", "scale_input")
"""Scales of a layer's inputs, which do not affect its weights."""
_LONGEST_DESCRIPTION = 4096
"""Maximum bytes. ComfyUI's have less than 100."""


def open_safetensors(path: Path) -> WeightsFile:
    """Open a safetensors file. Raises CheckpointError for a damaged one and for invalid scales."""
    header, metadata = read_header(path), read_metadata(path)
    plain = {name: PlainTensor(path, name, entry.dtype, entry.shape, entry.begin) for name, entry in header.items()}
    if (refused := refused_format(header, metadata)) is not None:
        name, refusal = refused
        return WeightsFile(path, name, plain, header, metadata, refusal=refusal)
    layers, format_name = _layers(path, header, metadata)
    if not layers:
        float8 = any(entry.dtype in FLOAT8 for entry in header.values())
        aside = {name for name in header if _is_marker(name)} if float8 else set()
        tensors = {name: tensor for name, tensor in plain.items() if name not in aside}
        return WeightsFile(path, FLOAT8_ALONE if float8 else None, tensors, header, metadata)
    if unread := sorted({str(each.get("format")) for each in layers.values()} - {*_FLOAT8_FORMATS, _INT8_FORMAT}):
        refusal = Refusal(
            f"its weights are quantized to ComfyUI's {', '.join(unread)[:200]}, which sdflow does not read",
            f"Supported are {', '.join((*_FLOAT8_FORMATS, _INT8_FORMAT))}, GGUF, and files of 16 bits.",
        )
        return WeightsFile(path, format_name, plain, header, metadata, refusal=refusal)
    scaled = {f"{layer}.weight": _scaled(path, layer, described, header) for layer, described in layers.items()}
    aside = {name for name in header if _is_aside(name, layers)}
    kept: dict[str, StoredTensor] = {name: tensor for name, tensor in plain.items() if name not in aside}
    return WeightsFile(path, format_name, {**kept, **scaled}, header, metadata, meaning=dict(_meaning(scaled)))


def _layers(
    path: Path, header: Mapping[str, TensorEntry], metadata: Mapping[str, str]
) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Layer -> its description, and the name of the format."""
    described: dict[str, Mapping[str, Any]] = {
        name.removesuffix(f".{_DESCRIPTION}"): _description(
            path, name, read_entry(path, name, _small(path, name, entry))
        )
        for name, entry in header.items()
        if name.endswith(f".{_DESCRIPTION}")
    }
    if _METADATA in metadata:
        described = {**described, **_described_in_header(path, metadata[_METADATA])}
    if described:
        return described, _DESCRIPTION
    found: dict[str, Mapping[str, Any]] = {}
    for name in header:
        layer, _, scale = name.rpartition(".")
        weight = header.get(f"{layer}.weight") if scale in _SCALES else None
        if weight is not None and weight.dtype == "I8":
            raise _invalid(path, f"{layer}.weight is int8 with a scale, but without a description of its quantization")
        if weight is not None and weight.dtype in FLOAT8:
            found[layer] = {"format": next(kind for kind, dtype in _FLOAT8_FORMATS.items() if dtype == weight.dtype)}
    return found, "fp8_scaled"


def _small(path: Path, name: str, entry: TensorEntry) -> TensorEntry:
    if entry.dtype not in ("U8", "I8") or entry.end - entry.begin > _LONGEST_DESCRIPTION:
        raise _invalid(path, f"{name} is not a description: {list(entry.shape)} of {entry.dtype}")
    return entry


def _description(path: Path, name: str, text: bytes | str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise _invalid(path, f"{name} is not JSON") from error
    if not isinstance(found, dict):
        raise _invalid(path, f"{name} is not a JSON object")
    return found


def _described_in_header(path: Path, text: str) -> dict[str, Mapping[str, Any]]:
    layers = _description(path, _METADATA, text).get("layers", {})
    if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
        raise _invalid(path, f"{_METADATA} has no map of layers")
    return layers


def _scaled(path: Path, layer: str, described: Mapping[str, Any], header: Mapping[str, TensorEntry]) -> ScaledTensor:
    name = f"{layer}.weight"
    weight, scales = header.get(name), [f"{layer}.{scale}" for scale in _SCALES if f"{layer}.{scale}" in header]
    wanted = _FLOAT8_FORMATS.get(described["format"], "I8")
    if weight is None:
        raise _invalid(path, f"it describes {layer}, but {name} is missing")
    if weight.dtype != wanted:
        raise _invalid(path, f"{name} is of dtype {weight.dtype}, but described as {described['format']}")
    if len(scales) != 1:
        raise _invalid(path, f"{name} has {len(scales)} scales")
    values = float_values(path, scales[0], _scale_entry(path, scales[0], header[scales[0]], weight))
    import numpy as np

    if not np.isfinite(values).all():
        raise _invalid(path, f"{scales[0]} is NaN or infinite")
    group = _group(path, name, described, weight) if wanted == "I8" else None
    # One for all values, or one per row.
    scale = values.reshape(-1, *(1,) * (len(weight.shape) - 1)) if values.size > 1 else values.reshape(())
    return ScaledTensor(path, name, wanted, weight.shape, weight.begin, scale, group)


def _scale_entry(path: Path, name: str, entry: TensorEntry, weight: TensorEntry) -> TensorEntry:
    """Check a scale's entry: a single number, or a column for a matrix, as torch would broadcast."""
    rows = len(weight.shape) == 2 and entry.shape == (weight.shape[0], 1)
    if not (rows or entry.shape in ((), (1,), (1,) * len(weight.shape))):
        raise _invalid(path, f"{name} is {list(entry.shape)} for a weight of {list(weight.shape)}")
    return entry


def _group(path: Path, name: str, described: Mapping[str, Any], weight: TensorEntry) -> int | None:
    """Number of columns that are rotated together; None if there is no rotation."""
    more = described.get("params")
    more = more if isinstance(more, dict) else {}
    if not described.get("convrot", more.get("convrot", False)):
        return None
    size = described.get("convrot_groupsize", more.get("convrot_groupsize", ROTATED_GROUP))
    try:
        return require_group(size, weight.shape)
    except ValueError as error:
        raise _invalid(path, f"{name}: {error}") from error


def _is_marker(name: str) -> bool:
    return name == _MARKER or name.endswith(f".{_MARKER}")


def _is_aside(name: str, layers: Mapping[str, Any]) -> bool:
    """Whether a tensor is not the model's: a marker, or the description or scale of a quantized layer. Other scales
    remain, so that fitting the model rejects them."""
    layer, _, last = name.rpartition(".")
    return (layer in layers and last in (*_SCALES, *_OF_INPUTS, _DESCRIPTION)) or _is_marker(name)


def _meaning(scaled: Mapping[str, ScaledTensor]) -> Iterator[tuple[str, Any]]:
    for name, tensor in scaled.items():
        yield name, {"dtype": tensor.dtype, "rotated": tensor.group}


def _invalid(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"not a valid quantized file: {what[:400]}", where=str(path), remedy="Download or write the file again."
    )


ROTATED_GROUP = 256
"""Columns that are rotated together, unless a description says otherwise."""
_LARGEST_GROUP = 4**8
"""Up to this many columns of int8 values add up exactly."""


@dataclass(frozen=True)
class ScaledTensor(StoredTensor):
    """A float8 or int8 weight with its scales.

    begin: offset of the values in the file, one byte each. scale: one number, or a column. group: columns rotated
    together; None without rotation.
    """

    begin: int
    scale: NDArray[np.float32] = field(compare=False)
    group: int | None = None

    def values(self, rows: slice = ALL) -> NDArray[Any]:
        import numpy as np

        first, count, shape = row_range(rows, self.shape)
        raw = mapped(self.path, self.begin + first, count)
        scale = self.scale if self.scale.ndim == 0 else self.scale[rows]
        values: NDArray[Any]
        if self.dtype != "I8":
            values = float8_values(self.dtype)[raw].reshape(shape)
            values *= scale
            return values
        whole = raw.view(np.int8).reshape(shape)
        if self.group is None:
            values = whole.astype(np.float32)
            values *= scale
            return values
        values, step = np.empty(shape, np.float32), max(1, STEP // shape[1])
        for row in range(0, shape[0], step):
            part = slice(row, row + step)
            factor = scale if scale.ndim == 0 else scale[part]
            # The root is a power of 2, so the division is exact.
            values[part] = rotated(whole[part], self.group).astype(np.float32) * (factor / isqrt(self.group))
        return values


def rotated(values: NDArray[np.int8], group: int) -> NDArray[np.int32]:
    """values H^T in integers, without the division by the root of the group's size."""
    import numpy as np

    steps = (group.bit_length() - 1) // 2
    found = values.astype(np.int32).reshape(-1, *(4,) * steps)
    for axis in range(1, steps + 1):  # each factor: the sum of four minus twice the opposite one
        found = found.sum(axis, keepdims=True, dtype=np.int32) - 2 * np.flip(found, axis)
    return found.reshape(values.shape)


def require_group(size: Any, shape: tuple[int, ...]) -> int:
    """The group size, checked for a matrix of this shape. Raises ValueError."""
    if not isinstance(size, int) or isinstance(size, bool) or not 4 <= size <= _LARGEST_GROUP:
        raise ValueError(f"a rotation of groups of {size!r:.40}")
    if size & (size - 1) or (size.bit_length() - 1) % 2:
        raise ValueError(f"a rotation of groups of {size}, which is not a power of 4")
    if len(shape) != 2 or shape[1] % size:
        raise ValueError(f"a rotation of groups of {size} for a weight of {list(shape)}")
    return size
