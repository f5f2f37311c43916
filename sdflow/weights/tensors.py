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

from sdflow.errors import CheckpointError
from sdflow.sources.checkpoint import CLASS_OF, COMPONENT_OF, check_stamps
from sdflow.sources.load import UNUSED, current_name, load_pickle, places
from sdflow.sources.safetensors_file import read_header
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
    """The tensors of a submodel's checkpoint, each read when it is asked for.

    load: as `open_checkpoint` gives it. parameters: those of the whole module, each of which must be there.
    Raises CheckpointError naming the tensors that are missing, unexpected or of a wrong shape, and when a file changed.
    """
    component = COMPONENT_OF[submodel]
    if load["kind"] == "synthetic":
        yield _Synthetic(CLASS_OF[component], parameters, load["seed"])
        return
    check_stamps(load["files"])
    files = [Path(stamp["path"]) for stamp in load["files"]]
    source = _Pickled if load["pickled"] else _Files
    yield source(component, files, load.get("prefix"), parameters)
    check_stamps(load["files"])


class _Synthetic:
    def __init__(self, class_name: str, shapes: Shapes, seed: int) -> None:
        self._class_name, self._shapes, self._seed = class_name, shapes, seed

    def read(self, key: str) -> Array:
        name = canonical_name(key)
        return synthetic_tensors(self._class_name, {name: self._shapes[key]}, self._seed)[name]


class _Files:
    """Tensors of one or more safetensors files, read at their offsets."""

    def __init__(self, component: str, files: Sequence[Path], prefix: str | None, parameters: Shapes) -> None:
        self._shapes = parameters
        found = [(file, name, entry) for file in files for name, entry in read_header(file).items()]
        names = [(name, entry.shape) for _, name, entry in found]
        places = _places(component, names, prefix, parameters, str(files[0]))
        self._entries = {key: (found[index][0], found[index][2]) for key, index in places.items()}

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


class _Pickled:
    """Tensors of pickles. torch maps their values from the file (`load_pickle`)."""

    def __init__(self, component: str, files: Sequence[Path], prefix: str | None, parameters: Shapes) -> None:
        self._shapes = parameters
        found = [item for file in files for item in load_pickle(file, "cpu").items()]
        names = [(name, tuple(tensor.shape)) for name, tensor in found]
        places = _places(component, names, prefix, parameters, str(files[0]))
        self._tensors = {key: found[index][1] for key, index in places.items()}

    def read(self, key: str) -> Array:
        tensor = self._tensors[key]
        exact = tensor.contiguous() if str(tensor.dtype) == "torch.float16" else tensor.float().contiguous()
        values: Array = exact.numpy().reshape(self._shapes[key])
        return values


def _places(
    component: str, names: Sequence[tuple[str, tuple[int, ...]]], prefix: str | None, parameters: Shapes, where: str
) -> dict[str, int]:
    """Key of the module's state_dict -> index of its tensor among `names`, a file's tensors with their shapes.

    prefix: of the tensors that belong to this component, in a file in the original layout.
    """
    key_of = places(component, parameters, original=prefix is not None)
    found: dict[str, int] = {}
    unexpected, misshapen = [], []
    for index, (name, shape) in enumerate(names):
        if not name.startswith(prefix or ""):
            continue
        key = key_of.get(current_name(component, name.removeprefix(prefix or "")))
        if key is None or key in found:
            if not name.endswith(UNUSED):
                unexpected.append(name)
            continue
        # The original layout and the oldest files hold the VAE's attention as 1x1 convolutions: the same values.
        as_convolution = component == "vae" and shape == (*parameters[key], 1, 1)
        if shape != parameters[key] and not as_convolution:
            misshapen.append(f"{name} is {list(shape)} where {list(parameters[key])} belongs")
        found[key] = index
    missing = sorted(set(parameters) - set(found))
    if missing or unexpected or misshapen:
        kinds = (("missing:", missing), ("unexpected:", unexpected), ("of a wrong shape:", misshapen))
        raise CheckpointError(
            "its tensors do not fit the architecture; "
            + "; ".join(f"{label} {', '.join(wrong[:5])} ({len(wrong)} in all)" for label, wrong in kinds if wrong),
            where=where,
            remedy="The weights and the configuration belong to different models, or the file is incomplete.",
        )
    return found
