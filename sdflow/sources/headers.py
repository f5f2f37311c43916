"""Whether the files of a checkpoint can be built at all, from their headers: before anything is exported, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import part_of
from sdflow.models.base import Shapes
from sdflow.sources.checkpoint import SubmodelCheckpoint, files_of, listing
from sdflow.sources.fitting import fit
from sdflow.sources.load import require_size
from sdflow.sources.safetensors_file import FLOATS, TensorEntry, read_header

_INDEXES = ("I64", "I32")
"""Types of tensors that are no weights: position_ids, counts of steps."""


def require_loadable(submodels: Mapping[str, SubmodelCheckpoint]) -> None:
    """Raises CheckpointError for the first submodel whose files hold other tensors than its configuration asks for, tensors
    that are not of a floating-point type, or one tensor twice.

    Of pickles, and of networks whose parameters only their class knows (`Model.parameters`), it is seen when they are loaded.
    """
    headers: dict[Path, Mapping[str, TensorEntry]] = {}
    seen: list[Mapping[str, Any]] = []
    for name, submodel in submodels.items():
        load = submodel.load
        if load["kind"] != "files" or load["pickled"] or any(load == other for other in seen):
            continue
        seen.append(load)
        for file, _ in files_of(load):
            headers.setdefault(file, read_header(file))
        _require(name, load, headers)


def _require(name: str, load: Mapping[str, Any], headers: Mapping[Path, Mapping[str, TensorEntry]]) -> None:
    part, prefix = part_of(load, name), load.get("prefix") or ""
    held: dict[str, tuple[Path, TensorEntry]] = {}
    for file, begin in files_of(load):
        for bare, entry in headers[file].items():
            if not bare.startswith(prefix):
                continue
            if (key := f"{begin}{bare}") in held:
                raise CheckpointError(
                    f"{listing([bare])} lies in {held[key][0].name} too: which of the two counts is not said",
                    where=str(file),
                    remedy="Download both files again, or save the model again.",
                )
            held[key] = file, entry
    for key, (file, entry) in held.items():
        if entry.dtype not in (*FLOATS, *_INDEXES):
            raise CheckpointError(
                f"{listing([key])} is of dtype {entry.dtype}: the file is quantized",
                where=str(file),
                remedy="Use the float16, bfloat16 or float32 file of this model; a pass of the workflow quantizes "
                "(docs/quantization.md).",
            )
    require_size(load["config"], f"config of {name}")
    parameters = _parameters(part.model, load["config"])
    if parameters is None:
        return
    where = load["files"][0]["path"]
    stored = [(key, entry.shape) for key, (_, entry) in held.items()]
    found = fit(part, stored, parameters, load.get("prefix"), where)
    types = [entry.dtype for _, entry in held.values()]
    if odd := [key for key, place in found.items() if types[place.index] not in FLOATS]:
        raise CheckpointError(
            f"{listing(odd)} is not of a floating-point type", where=where, remedy="Download the model again."
        )


def _parameters(model: Any, config: Mapping[str, Any]) -> Shapes | None:
    try:
        parameters: Shapes | None = model.parameters(config)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None  # a config that lacks something: its class says what
    return parameters
