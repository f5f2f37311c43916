"""Reads single tensors of a checkpoint by the keys of the module's `state_dict`, without torch and without the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sdflow.errors import CheckpointError
from sdflow.sources.checkpoint import CLASS_OF, COMPONENT_OF, check_stamps
from sdflow.sources.load import current_name
from sdflow.sources.safetensors_file import TensorEntry, read_header
from sdflow.sources.synthetic import canonical_name, synthetic_tensors

Array = NDArray[Any]
Shapes = Mapping[str, tuple[int, ...]]

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Tensors(Protocol):
    """Parameters by their keys. `read` may be called from several threads."""

    def read(self, key: str) -> Array:
        """The values of a parameter, float32, or float16 where they are stored so."""


@contextmanager
def open_tensors(submodel: str, load: Mapping[str, Any], parameters: Shapes) -> Iterator[Tensors]:
    """The tensors of a submodel's checkpoint.

    load: as `open_checkpoint` gives it. parameters: those of the whole module, each of which must be there.
    Raises CheckpointError naming the tensors that are missing, unexpected or of a wrong shape, and when a file changed.
    """
    if load["kind"] == "synthetic":
        yield _Synthetic(CLASS_OF[COMPONENT_OF[submodel]], parameters, load["seed"])
    elif load["kind"] == "files" and not load["pickled"]:
        check_stamps(load["files"])
        yield _Files(COMPONENT_OF[submodel], [Path(stamp["path"]) for stamp in load["files"]], parameters)
        check_stamps(load["files"])
    else:  # pickles cannot be read in parts
        from sdflow.sources.load import load_module

        yield _InMemory({key: value.numpy() for key, value in load_module(submodel, load).state_dict().items()})


class _Synthetic:
    def __init__(self, class_name: str, shapes: Shapes, seed: int) -> None:
        self._class_name, self._shapes, self._seed = class_name, shapes, seed

    def read(self, key: str) -> Array:
        name = canonical_name(key)
        return synthetic_tensors(self._class_name, {name: self._shapes[key]}, self._seed)[name]


class _InMemory:
    def __init__(self, values: Mapping[str, Array]) -> None:
        self._values = values

    def read(self, key: str) -> Array:
        return self._values[key]


class _Files:
    """Tensors of one or more safetensors files, read at their offsets."""

    def __init__(self, component: str, files: list[Path], parameters: Shapes) -> None:
        places = {canonical_name(key): key for key in parameters}
        self._entries: dict[str, tuple[Path, TensorEntry]] = {}
        self._shapes = parameters
        unexpected, misshapen = [], []
        for file in files:
            for name, entry in read_header(file).items():
                key = places.get(current_name(component, name))
                if key is None or key in self._entries:
                    # Older releases saved this buffer, which is 0, 1, 2, ...
                    if not name.endswith("embeddings.position_ids"):
                        unexpected.append(name)
                    continue
                # The oldest files hold the VAE's attention as 1x1 convolutions: the same values, two axes more.
                as_convolution = component == "vae" and entry.shape == (*parameters[key], 1, 1)
                if entry.shape != parameters[key] and not as_convolution:
                    misshapen.append(f"{name} is {list(entry.shape)} where {list(parameters[key])} belongs")
                self._entries[key] = file, entry
        missing = sorted(set(parameters) - set(self._entries))
        if missing or unexpected or misshapen:
            kinds = (("missing:", missing), ("unexpected:", unexpected), ("of a wrong shape:", misshapen))
            raise CheckpointError(
                "its tensors do not fit the architecture; "
                + "; ".join(f"{label} {', '.join(names[:5])} ({len(names)} in all)" for label, names in kinds if names),
                where=str(files[0]),
                remedy="The weights and the configuration belong to different models, or the file is incomplete.",
            )

    def read(self, key: str) -> Array:
        path, entry = self._entries[key]
        if entry.dtype not in _NUMPY:
            raise CheckpointError(
                f"tensor {key} is of dtype {entry.dtype}", where=str(path), remedy="Convert it to F32, F16 or BF16."
            )
        raw = np.memmap(path, np.uint8, "r", entry.begin, (entry.end - entry.begin,))  # read as it is used, then let go
        values: Array = np.asarray(raw).view(_NUMPY[entry.dtype]).reshape(self._shapes[key])
        if not values.flags.aligned:  # a header of odd length
            values = values.copy()
        if entry.dtype == "BF16":  # the upper half of a float32
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.astype(np.float32) if entry.dtype == "F64" else values
