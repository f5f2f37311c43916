"""Read single tensors of a checkpoint by `state_dict` key.

torch is only needed for pickles.
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
from sdflow.families import part_of
from sdflow.families.shared.part import Part
from sdflow.sources.checkpoint import files_of, stamps_of
from sdflow.sources.fitting import apart, fit
from sdflow.sources.formats import StoredTensor, open_weights
from sdflow.sources.load import load_pickle
from sdflow.sources.synthetic import blocks_of, tensors_for
from sdflow.weights.half import widened

Array = NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Tensors:
    """Parameters by key. read: values as float32, or float16 if stored so. blocks: the same values in row-major order
    as flat blocks, also bfloat16 if stored so. Both are thread-safe. file: their source, for messages."""

    read: Callable[[str], Array]
    blocks: Callable[[str], Iterator[Array]]
    file: Callable[[str], str]


@contextmanager
def open_tensors(submodel: str, load: Mapping[str, Any], parameters: Shapes) -> Iterator[Tensors]:
    """Open the tensors of a submodel's checkpoint; each is read on access.

    load: from `open_checkpoint`. parameters: of the whole module; all must exist.
    Raises CheckpointError naming tensors that are missing, unexpected or of a wrong shape, and if a file changes.
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
    """Return memory-mapped tensors of one or more weight files."""
    found: list[tuple[str, StoredTensor]] = []
    for file, begin in files:
        opened = open_weights(file)
        opened.require_read()
        found += [(f"{begin}{name}", tensor) for name, tensor in opened.tensors.items()]
    places = fit(part, [(name, tensor.shape) for name, tensor in found], parameters, prefix, str(files[0][0]))
    stored = {key: found[place.index][1] for key, place in places.items()}

    def as_stored(key: str) -> Array:
        place, tensor = places[key], stored[key]
        if place.original.identity:
            return np.eye(parameters[key][0], dtype=np.float32)
        values: Array = place.arranged(tensor.as_stored(place.rows(tensor.shape)), parameters[key])
        aligned = values.flags.aligned and values.flags.c_contiguous
        return values if aligned else values.copy()  # after a header of odd length, or for a transposed matrix

    def blocks(key: str) -> Iterator[Array]:
        yield as_stored(key).reshape(-1)  # read on access

    def read(key: str) -> Array:
        values = as_stored(key)
        return values if values.dtype == np.float16 else widened(values)

    return Tensors(read, blocks, lambda key: str(stored[key].path))


def _pickled(part: Part, files: Sequence[tuple[Path, str]], prefix: str | None, parameters: Shapes) -> Tensors:
    """Return tensors of pickles. torch maps their values from the file (`load_pickle`)."""
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
