"""Read low-bit weights for a proof with safetensors, `gguf` and PyTorch, without `sdflow.sources.formats`.

GGUF files are read by `gguf.GGUFReader`. llama.cpp's files are mapped to transformers' parameter names by the `gguf`
package's name table. Quantized safetensors are dequantized in PyTorch like comfy-kitchen, the rotation as a product
with the whole matrix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError
from sdflow.families.shared.part import Part
from sdflow.models.base import Shapes
from sdflow.sources.checkpoint import files_of
from sdflow.sources.fitting import fit

if TYPE_CHECKING:
    import torch

Read = Callable[[], "torch.Tensor"]
Held = Mapping[str, tuple[tuple[int, ...], Read]]
"""Tensor -> its shape, and a function that reads its values in float32."""

_SCALES = (".weight_scale", ".scale_weight")
_ASIDE = (*_SCALES, ".input_scale", ".scale_input", ".comfy_quant", "scaled_fp8")


def low_bit_reader(part: Part, load: Mapping[str, Any], expected: Shapes) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a parameter in float32 on demand. load: of files with low-bit weights.

    Raises CheckpointError if a parameter has no tensor.
    """
    held: dict[str, tuple[tuple[int, ...], Read]] = {}
    architecture = None
    for file, begin in files_of(load):
        found, architecture = dequantized_file(file)
        held |= {f"{begin}{name}": each for name, each in found.items()}
    where = str(load["files"][0]["path"])
    if (named := _named_by_gguf(part, architecture, expected, held)) is not None:
        if missing := sorted(key for key, name in named.items() if name not in held):
            raise CheckpointError(f"gguf names no tensor for {', '.join(missing[:5])}", where=where)
        return lambda key: held[named[key]][1]().reshape(expected[key])
    stored = [(name, shape) for name, (shape, _) in held.items()]
    places = fit(part, stored, expected, load.get("prefix"), where)
    reads = [read for _, read in held.values()]
    return lambda key: places[key].values(reads[places[key].index](), expected[key]).contiguous()


def dequantized_file(path: Path) -> tuple[Held, str | None]:
    """The tensors of a file, and a GGUF file's name for its architecture."""
    return _of_gguf(path) if path.suffix.lower() == ".gguf" else (_of_safetensors(path), None)


def _of_gguf(path: Path) -> tuple[Held, str | None]:
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    field = reader.get_field("general.architecture")
    found = {tensor.name: (_shape(reader, tensor), _dequantized(reader, tensor)) for tensor in reader.tensors}
    return found, None if field is None else str(field.contents())


def _shape(reader: Any, tensor: Any) -> tuple[int, ...]:
    original = reader.get_field(f"comfy.gguf.orig_shape.{tensor.name}")
    return tuple(original.contents()) if original is not None else tuple(int(size) for size in tensor.shape[::-1])


def _dequantized(reader: Any, tensor: Any) -> Read:
    def read() -> torch.Tensor:
        import numpy as np
        import torch
        from gguf import dequantize

        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        return torch.from_numpy(values).reshape(_shape(reader, tensor))

    return read


def _named_by_gguf(part: Part, architecture: str | None, expected: Shapes, held: Held) -> dict[str, str] | None:
    """Parameter -> its tensor, from gguf's table; None for a file without llama.cpp's names."""
    blocks = [int(found[1]) for name in held if (found := re.search(r"\bblk\.(\d+)\.", name))]
    if architecture is None or not blocks:
        return None
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        return None
    table = get_tensor_name_map(kind, max(blocks) + 1)
    names: dict[str, str] = {}
    for key in expected:
        bare, _, suffix = part.model.current_name(key).rpartition(".")  # for a tied parameter, the name used in files
        name = table.get_name(bare) or table.get_name(f"model.{bare}")
        names[key] = f"{name}.{suffix}"
    return names


def _of_safetensors(path: Path) -> Held:
    from safetensors import safe_open

    with safe_open(path, "pt") as stream:
        names = list(stream.keys())
        shapes = {name: tuple(stream.get_slice(name).get_shape()) for name in names}
        described = json.loads((stream.metadata() or {}).get("_quantization_metadata", "{}")).get("layers", {})
    return {
        name: (shapes[name], _multiplied(path, name, names, described)) for name in names if not name.endswith(_ASIDE)
    }


def _multiplied(path: Path, name: str, names: list[str], described: Mapping[str, Any]) -> Read:
    def read() -> torch.Tensor:
        from safetensors import safe_open

        layer = name.removesuffix(".weight")
        with safe_open(path, "pt") as stream:
            values = stream.get_tensor(name).float()
            scales = [f"{layer}{suffix}" for suffix in _SCALES if f"{layer}{suffix}" in names]
            if name == layer or not scales:
                return values
            values = values * stream.get_tensor(scales[0]).float()
            text = f"{layer}.comfy_quant"
            own = json.loads(bytes(stream.get_tensor(text).tolist())) if text in names else {}
        said = described.get(layer, own)
        said = {**said.get("params", {}), **said}
        return _unrotated(values, int(said.get("convrot_groupsize", 256))) if said.get("convrot") else values

    return read


def _unrotated(values: torch.Tensor, group: int) -> torch.Tensor:
    import torch

    factor = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < group:
        matrix = torch.kron(matrix, factor)
    matrix = matrix / group**0.5
    return (values.reshape(-1, prod(values.shape) // values.shape[0] // group, group) @ matrix.T).reshape(values.shape)
