"""A weight file's metadata, and its tensors' names, shapes and types, without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from sdflow.disk.input_file import is_regular, no_file
from sdflow.errors import CheckpointError
from sdflow.sources.formats import StoredTensor, WeightsFile, open_weights
from sdflow.sources.load import unpickled
from sdflow.sources.reference import FILE_SUFFIXES, PICKLE_SUFFIXES

SUFFIXES = (*FILE_SUFFIXES, *PICKLE_SUFFIXES)
_TITLES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "F8_E5M2": "float8",
}
_NESTED = ("state_dict", "string_to_param")
"""Keys under which pickles store their tensors."""


@dataclass(frozen=True)
class Contents:
    """A file's tensors by name: shapes and types ("float16"). opened: unless it is a pickle."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict)
    pickled: bool = False
    opened: WeightsFile | None = None

    @property
    def precision(self) -> str | None:
        """The types of the values, most frequent first: "float16", "float16 (98 %), float32 (2 %)"."""
        return precision_of([self])


def read_contents(path: Path) -> Contents:
    """Read only the header; a pickle is read with weights_only=True, without its values.

    Raises CheckpointError if the file is missing, damaged, or not a weight file.
    """
    if not is_regular(path):
        raise CheckpointError(no_file(path), where=str(path), remedy="Check the path.")
    if path.suffix.lower() in FILE_SUFFIXES:
        opened = open_weights(path)
        return Contents(
            path,
            opened.shapes,
            {name: _title(tensor) for name, tensor in opened.tensors.items()},
            opened.metadata,
            opened=opened,
        )
    if path.suffix.lower() in PICKLE_SUFFIXES:
        return _of_pickle(path)
    raise CheckpointError(
        f"the file type {path.suffix!r} is unknown", where=str(path), remedy=f"Known: {', '.join(SUFFIXES)}."
    )


def _title(tensor: StoredTensor) -> str:
    """A tensor's type; GGUF types keep their names."""
    return _TITLES.get(tensor.dtype, tensor.dtype if tensor.low_bits else tensor.dtype.lower())


def _of_pickle(path: Path) -> Contents:
    import torch

    value = unpickled(path, "meta")
    marks: dict[str, str] = {}
    if isinstance(value, dict):
        marks = {str(name): str(each) for name, each in value.items() if isinstance(each, str | int | float)}
        value = next((value[name] for name in _NESTED if isinstance(value.get(name), dict)), value)
    tensors = (
        {str(name): each for name, each in value.items() if isinstance(each, torch.Tensor)}
        if isinstance(value, dict)
        else {}
    )
    if not tensors:
        raise CheckpointError("a pickle without tensors by name", where=str(path), remedy="Use a .safetensors file.")
    return Contents(
        path,
        {name: tuple(each.shape) for name, each in tensors.items()},
        {name: str(each.dtype).removeprefix("torch.") for name, each in tensors.items()},
        marks,
        pickled=True,
    )


def precision_of(files: Iterable[Contents]) -> str | None:
    """The types of the values in all files, by share; None without tensors."""
    count: Counter[str] = Counter()
    for each in files:
        for name, shape in each.shapes.items():
            count[each.types[name]] += prod(shape)
    total = sum(count.values())
    if not total:
        return None
    first, *others = count.most_common()
    if not others:
        return first[0]
    return ", ".join(f"{name} ({max(1, round(100 * part / total))} %)" for name, part in (first, *others))
