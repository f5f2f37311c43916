"""Reads single tensors of a checkpoint by the keys of the module's `state_dict`, without the rest.

Needs torch for pickles alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sdflow.disk.file_stamp import check_stamps
from sdflow.errors import CheckpointError
from sdflow.families import part_of
from sdflow.families.shared.part import Part
from sdflow.models.base import Model
from sdflow.sources.checkpoint import files_of, stamps_of
from sdflow.sources.fitting import apart, fit
from sdflow.sources.load import load_pickle
from sdflow.sources.safetensors_file import read_header
from sdflow.sources.synthetic import tensors_for

Array = NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Tensors(Protocol):
    """Parameters by their keys. `read` may be called from several threads."""

    def read(self, key: str) -> Array:
        """The values of a parameter, float32, or float16 where they are stored so."""

    def file(self, key: str) -> str:
        """Where they are from, for messages."""


@contextmanager
def open_tensors(submodel: str, load: Mapping[str, Any], parameters: Shapes) -> Iterator[Tensors]:
    """The tensors of a submodel's checkpoint, each read when it is asked for.

    load: as `open_checkpoint` gives it. parameters: those of the whole module, each of which must be there.
    Raises CheckpointError naming the tensors that are missing, unexpected or of a wrong shape, and when a file changed.
    """
    check_stamps(stamps_of(load))
    sources = [
        (shapes, _opened(part, how, shapes)) for part, how, shapes in apart(part_of(load, submodel), load, parameters)
    ]
    yield _Joined({key: source for shapes, source in sources for key in shapes}) if len(sources) > 1 else sources[0][1]
    check_stamps(stamps_of(load))


def _opened(part: Part, load: Mapping[str, Any], parameters: Shapes) -> Tensors:
    if load["kind"] == "synthetic":
        return _Synthetic(part.model, parameters, load["seed"])
    return (_Pickled if load["pickled"] else _Files)(part, files_of(load), load.get("prefix"), parameters)


class _Joined:
    """Tensors of several sources."""

    def __init__(self, sources: Mapping[str, Tensors]) -> None:
        """sources: by the parameters that they hold."""
        self._sources = sources

    def read(self, key: str) -> Array:
        return self._sources[key].read(key)

    def file(self, key: str) -> str:
        return self._sources[key].file(key)


class _Synthetic:
    def __init__(self, model: Model, shapes: Shapes, seed: int) -> None:
        self._model, self._shapes, self._seed = model, shapes, seed

    def read(self, key: str) -> Array:
        return tensors_for(self._model, {key: self._shapes[key]}, self._seed)[key]

    def file(self, key: str) -> str:
        return "synthetic weights"


class _Files:
    """Tensors of one or more safetensors files, read at their offsets."""

    def __init__(self, part: Part, files: Sequence[tuple[Path, str]], prefix: str | None, parameters: Shapes) -> None:
        self._shapes = parameters
        found = [(file, f"{begin}{name}", entry) for file, begin in files for name, entry in read_header(file).items()]
        names = [(name, entry.shape) for _, name, entry in found]
        self._places = fit(part, names, parameters, prefix, str(files[0][0]))
        self._entries = {key: (found[place.index][0], found[place.index][2]) for key, place in self._places.items()}

    def read(self, key: str) -> Array:
        path, entry = self._entries[key]
        if self._places[key].original.identity:
            return np.eye(self._shapes[key][0], dtype=np.float32)
        if entry.dtype not in _NUMPY:
            raise CheckpointError(
                f"tensor {key} is of dtype {entry.dtype}", where=str(path), remedy="Convert it to F32, F16 or BF16."
            )
        raw = np.memmap(path, np.uint8, "r", entry.begin, (entry.end - entry.begin,))  # read as it is used, then let go
        stored: Array = np.asarray(raw).view(_NUMPY[entry.dtype]).reshape(entry.shape)
        values: Array = self._places[key].values(stored, self._shapes[key])
        if not (values.flags.aligned and values.flags.c_contiguous):  # a header of odd length; a transposed matrix
            values = values.copy()
        if entry.dtype == "BF16":  # the upper half of a float32
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.astype(np.float32) if entry.dtype == "F64" else values

    def file(self, key: str) -> str:
        return str(self._entries[key][0])


class _Pickled:
    """Tensors of pickles. torch maps their values from the file (`load_pickle`)."""

    def __init__(self, part: Part, files: Sequence[tuple[Path, str]], prefix: str | None, parameters: Shapes) -> None:
        self._shapes = parameters
        held = [
            (file, f"{begin}{name}", tensor)
            for file, begin in files
            for name, tensor in load_pickle(file, "cpu").items()
        ]
        names = [(name, tuple(tensor.shape)) for _, name, tensor in held]
        places = fit(part, names, parameters, prefix, str(files[0][0]))
        self._files = {key: held[place.index][0] for key, place in places.items()}
        self._tensors = {key: place.values(held[place.index][2], parameters[key]) for key, place in places.items()}

    def read(self, key: str) -> Array:
        tensor = self._tensors[key]
        exact = tensor.contiguous() if str(tensor.dtype) == "torch.float16" else tensor.float().contiguous()
        values: Array = exact.numpy().reshape(self._shapes[key])
        return values

    def file(self, key: str) -> str:
        return str(self._files[key])
