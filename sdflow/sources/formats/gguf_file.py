"""GGUF files: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

The header is read here, with limits and without a package. Quantized values are dequantized by the `gguf` package,
ggml's published reference. Tensors keep their names in the file. Shapes have safetensors' order, the reverse of GGUF's;
tensors that ComfyUI-GGUF (city96) reshaped, because their rows are not whole blocks, get their original shapes
(`comfy.gguf.orig_shape.NAME`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError
from sdflow.sources.formats.ggml_types import TYPES, GgmlType
from sdflow.sources.formats.gguf_header import Header, TensorInfo, invalid, read_gguf_header
from sdflow.sources.formats.mapped import STEP, mapped, row_range
from sdflow.sources.formats.plain import PlainTensor
from sdflow.sources.formats.stored import ALL, StoredTensor, WeightsFile
from sdflow.sources.safetensors_file import TensorEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "gguf"
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_SPLIT = "split.count"
_ROW = 1 << 14
"""Values per row passed to `gguf`, which processes 16 rows at a time, in many small steps if rows are short."""


@dataclass(frozen=True)
class BlockTensor(StoredTensor):
    """A tensor quantized in blocks. begin: offset of its bytes in the file. kind: its type's sizes."""

    begin: int
    kind: GgmlType

    def values(self, rows: slice = ALL) -> NDArray[Any]:
        first, count, shape = row_range(rows, self.shape)
        block = self.kind.block
        if first % block or count % block:  # a reshaped tensor: rows do not start at blocks
            return self.values()[rows]
        return self._blocks(first // block, count // block).reshape(shape)

    def _blocks(self, first: int, count: int) -> NDArray[Any]:
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[self.dtype]
        raw = mapped(self.path, self.begin + first * self.kind.size, count * self.kind.size)
        found = np.empty(count * self.kind.block, np.float32)
        row = max(1, _ROW // self.kind.block)
        with np.errstate(all="ignore"):  # NaN or infinite scales are reported when weights are checked
            for begin, end in _steps(count, row, STEP // self.kind.block // row * row):
                part = raw[begin * self.kind.size : end * self.kind.size].reshape(
                    -1, min(row, end - begin) * self.kind.size
                )
                found[begin * self.kind.block : end * self.kind.block] = dequantize(part, kind).reshape(-1)
        return found


def _steps(count: int, row: int, step: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover `count`: whole rows, at most `step` each, then the rest."""
    whole = count // row * row
    for begin in range(0, whole, step):
        yield begin, min(begin + step, whole)
    if whole < count:
        yield whole, count


def open_gguf(path: Path) -> WeightsFile:
    """Open a GGUF file. Raises CheckpointError for a damaged file, and for one of several parts."""
    header = read_gguf_header(path)
    parts = header.values.get(_SPLIT, 1)
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            f"it is one of {parts} parts",
            where=str(path),
            remedy="Join them: llama-gguf-split --merge FIRST-FILE OUT.gguf.",
        )
    pieces = dict(_pieces(path, header))
    tensors: dict[str, StoredTensor] = {}
    for info in header.tensors:
        kind, begin = TYPES[info.kind], pieces[info.name].begin
        shape = _original_shape(path, header, info)
        plain = kind.block == 1
        tensors[info.name] = (
            PlainTensor(path, info.name, kind.name, shape, begin)
            if plain
            else BlockTensor(path, info.name, kind.name, shape, begin, kind)
        )
    architecture = header.values.get("general.architecture")
    return WeightsFile(
        path,
        FORMAT,
        tensors,
        pieces,
        {name: str(value)[:200] for name, value in header.values.items()},
        {name: {"shape": list(tensor.shape)} for name, tensor in tensors.items()},
        architecture if isinstance(architecture, str) else None,
        needs=("gguf",) if any(isinstance(tensor, BlockTensor) for tensor in tensors.values()) else (),
    )


def _pieces(path: Path, header: Header) -> list[tuple[str, TensorEntry]]:
    """Name -> the bytes of a tensor. As llama.cpp requires, tensors must be consecutive: each at the next multiple of
    the alignment, and at most padding after the last."""
    position, found = header.data_begin, []
    for info in header.tensors:
        kind = TYPES[info.kind]
        count = prod(info.shape)
        width = info.shape[-1] if info.shape else 1
        if width % kind.block:
            raise invalid(path, f"rows of {width} values of {info.name} are not whole blocks of {kind.name}")
        begin = header.data_begin + info.offset
        if begin != position:
            raise invalid(path, f"tensor {info.name} is at byte {begin}, but the previous one ends at {position}")
        end = begin + count // kind.block * kind.size
        found.append((info.name, TensorEntry(kind.name, info.shape, begin, end)))
        position = -(-end // header.alignment) * header.alignment
    last = found[-1][1].end if found else header.data_begin
    if not last <= header.size <= max(position, last):
        raise invalid(path, f"its tensors end at byte {last}, the file at byte {header.size}")
    return found


def _original_shape(path: Path, header: Header, info: TensorInfo) -> tuple[int, ...]:
    said = header.values.get(f"{_ORIGINAL_SHAPE}{info.name}")
    if said is None:
        return info.shape
    if not isinstance(said, tuple) or prod(said) != prod(info.shape) or any(size < 1 for size in said):
        raise invalid(path, f"{info.name} is {list(info.shape)}, but its original shape is given as {said!r:.80}")
    return said
