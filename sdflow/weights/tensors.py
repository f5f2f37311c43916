"""Reads single tensors of a checkpoint by the keys of the module's `state_dict`, without the rest.

Needs torch for pickles alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdflow.disk.file_stamp import check_stamps
from sdflow.errors import CheckpointError
from sdflow.families import part_of
from sdflow.families.shared.part import Part
from sdflow.sources.checkpoint import files_of, stamps_of
from sdflow.sources.fitting import apart, fit
from sdflow.sources.load import load_pickle
from sdflow.sources.safetensors_file import read_header
from sdflow.sources.synthetic import blocks_of, tensors_for
from sdflow.weights.half import numpy_type, widened

Array = NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]

_BLOCK = 1 << 20  # values read at a time

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True)
class Tensors:
    """Parameters by their keys. read: the values of one, float32, or float16 where they are stored so. blocks: the same values
    in row-major order, a flat block after the other, bfloat16 too where they are stored so. Both may be called from several
    threads. file: where they are from, for messages."""

    read: Callable[[str], Array]
    blocks: Callable[[str], Iterator[Array]]
    file: Callable[[str], str]


@contextmanager
def open_tensors(submodel: str, load: Mapping[str, Any], parameters: Shapes) -> Iterator[Tensors]:
    """The tensors of a submodel's checkpoint, each read when it is asked for.

    load: as `open_checkpoint` gives it. parameters: those of the whole module, each of which must be there.
    Raises CheckpointError naming the tensors that are missing, unexpected or of a wrong shape, and when a file changed.
    """
    check_stamps(stamps_of(load))
    sources: dict[str, Tensors] = {}
    for part, how, shapes in apart(part_of(load, submodel), load, parameters):
        sources |= dict.fromkeys(shapes, _opened(part, how, shapes))
    yield Tensors(
        lambda key: sources[key].read(key), lambda key: sources[key].blocks(key), lambda key: sources[key].file(key)
    )
    check_stamps(stamps_of(load))


def _opened(part: Part, load: Mapping[str, Any], parameters: Shapes) -> Tensors:
    if load["kind"] == "synthetic":
        seed = load["seed"]
        return Tensors(
            lambda key: tensors_for(part.model, {key: parameters[key]}, seed)[key],
            lambda key: blocks_of(part.model, key, parameters[key], seed),
            lambda key: "synthetic weights",
        )
    return (_pickled if load["pickled"] else _mapped)(part, files_of(load), load.get("prefix"), parameters)


def _mapped(part: Part, files: Sequence[tuple[Path, str]], prefix: str | None, parameters: Shapes) -> Tensors:
    """Tensors of one or more safetensors files, read at their offsets."""
    found = [(file, f"{begin}{name}", entry) for file, begin in files for name, entry in read_header(file).items()]
    places = fit(part, [(name, entry.shape) for _, name, entry in found], parameters, prefix, str(files[0][0]))
    entries = {key: (found[place.index][0], found[place.index][2]) for key, place in places.items()}

    def stored(key: str) -> Array:
        path, entry = entries[key]
        if places[key].original.identity:
            return np.eye(parameters[key][0], dtype=np.float32)
        if entry.dtype not in _NUMPY:
            raise CheckpointError(
                f"tensor {key} is of dtype {entry.dtype}", where=str(path), remedy="Convert it to F32, F16 or BF16."
            )
        raw = np.memmap(path, np.uint8, "r", entry.begin, (entry.end - entry.begin,))  # read as it is used, then let go
        values: Array = places[key].values(
            np.asarray(raw).view(_NUMPY[entry.dtype]).reshape(entry.shape), parameters[key]
        )
        if not (values.flags.aligned and values.flags.c_contiguous):  # a header of odd length; a transposed matrix
            values = values.copy()
        return values.view(numpy_type("bfloat16")) if entry.dtype == "BF16" else values

    def blocks(key: str) -> Iterator[Array]:
        values = stored(key).reshape(-1)
        for begin in range(0, values.size, _BLOCK):
            block = values[begin : begin + _BLOCK]
            yield block.astype(np.float32) if block.dtype == np.float64 else block

    def read(key: str) -> Array:
        values = stored(key)
        return values if values.dtype == np.float16 else widened(values)

    return Tensors(read, blocks, lambda key: str(entries[key][0]))


def _pickled(part: Part, files: Sequence[tuple[Path, str]], prefix: str | None, parameters: Shapes) -> Tensors:
    """Tensors of pickles. torch maps their values from the file (`load_pickle`)."""
    held = [
        (file, f"{begin}{name}", tensor) for file, begin in files for name, tensor in load_pickle(file, "cpu").items()
    ]
    names = [(name, tuple(tensor.shape)) for _, name, tensor in held]
    places = fit(part, names, parameters, prefix, str(files[0][0]))
    of_file = {key: str(held[place.index][0]) for key, place in places.items()}
    tensors = {key: place.values(held[place.index][2], parameters[key]) for key, place in places.items()}

    def read(key: str) -> Array:
        tensor = tensors[key]
        exact = tensor.contiguous() if str(tensor.dtype) == "torch.float16" else tensor.float().contiguous()
        values: Array = exact.numpy().reshape(parameters[key])
        return values

    return Tensors(read, lambda key: iter((read(key).reshape(-1),)), of_file.__getitem__)
