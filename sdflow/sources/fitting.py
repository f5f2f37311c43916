"""Map the tensors of a file to the parameters of a module, one to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import part_of
from sdflow.families.shared.part import Part
from sdflow.models.base import Original, Shapes
from sdflow.sources.checkpoint import SubmodelCheckpoint, files_of, listing
from sdflow.sources.formats import StoredTensor, WeightsFile, open_weights
from sdflow.sources.formats.plain import INDEXES

MOST_LAYERS = 512
"""Maximum number of layers in a config. The largest of these networks have 48."""


@dataclass(frozen=True)
class Found:
    """The location of a parameter's values: index of the tensor in the file, and the part of it."""

    index: int
    original: Original

    def values(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        """The parameter's values from a torch tensor or numpy array, in its shape, as a view if possible."""
        if self.original.identity:
            return _identity_like(tensor, shape[0])
        return self.arranged(tensor if self.original.parts == 1 else tensor[self.rows(tuple(tensor.shape))], shape)

    def rows(self, stored: tuple[int, ...]) -> slice:
        """The rows of a tensor of this shape that hold the parameter."""
        original = self.original
        if original.parts == 1:
            return slice(None)
        height = stored[0] // original.parts
        return slice(original.part * height, (original.part + original.taken) * height)

    def arranged(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        """The parameter's values from its rows, in its shape."""
        original = self.original
        if original.swapped:
            half = tensor.shape[0] // 2
            tensor = tensor.reshape(2, half, *tensor.shape[1:])[[1, 0]]
        if original.transposed:
            tensor = tensor.T
        return tensor.reshape(shape)


def apart(part: Part, load: Mapping[str, Any], parameters: Shapes) -> Iterator[tuple[Part, Mapping[str, Any], Shapes]]:
    """Group a module's parameters by load: the part's own, then those of each adapter.

    load: `SubmodelCheckpoint.load`. parameters: of the whole module.
    """
    if part.adapted is None or not load.get("adapters"):
        yield part, load, parameters
        return
    found: dict[int | None, dict[str, tuple[int, ...]]] = {}
    for key, shape in parameters.items():
        found.setdefault(part.adapted.of(key), {})[key] = shape
    yield part, load, found.pop(None)
    for index, adapter in enumerate(load["adapters"]):
        yield replace(part, layouts=(part.adapted.layout,)), adapter, found[index]


def fit(
    part: Part, stored: Sequence[tuple[str, tuple[int, ...]]], parameters: Shapes, prefix: str | None, where: str
) -> dict[str, Found]:
    """Key of the module's state_dict -> location of its values.

    stored: names and shapes of the file's tensors. parameters: of the whole module. prefix: of the part's tensors in
    the original layout; None for a file with the module's own names.
    Raises CheckpointError naming tensors that are missing, unexpected or of a wrong shape.
    """
    model = part.model
    if prefix is None:
        names = {key: Original(model.current_name(key)) for key in parameters}
        unused = model.unused
    else:
        layout = part.layout(prefix)
        names = (layout.names or model.original_names)(parameters)
        unused = lambda name, keys: layout.unused(name, keys) or model.unused(name, keys)  # noqa: E731
    keys_of: dict[str, list[str]] = {}
    for key, original in names.items():
        if not original.identity:
            keys_of.setdefault(original.name, []).append(key)
    found: dict[str, Found] = {}
    unexpected, misshapen = [], []
    for index, (name, shape) in enumerate(stored):
        if not name.startswith(prefix or ""):
            continue
        bare = model.current_name(name.removeprefix(prefix or ""))
        keys = [key for key in keys_of.get(bare, ()) if key not in found]
        if not keys and not unused(bare, parameters):
            unexpected.append(name)
        for key in keys:
            original = names[key]
            wanted = _stored_shape(parameters[key], original)
            if not model.fits(shape, wanted):
                misshapen.append(f"{name} is {list(shape)}, expected {list(wanted)}")
            found[key] = Found(index, original)
    found |= {key: Found(0, names[key]) for key in names if names[key].identity}
    missing = sorted(set(parameters) - set(found))
    if missing or unexpected or misshapen:
        raise CheckpointError(
            f"its tensors do not match {model.class_name} as configured; {_listed(missing, unexpected, misshapen)}",
            where=where,
            remedy="The weights and the configuration belong to different models, or the file is incomplete.",
        )
    return found


def _identity_like(tensor: Any, size: int) -> Any:
    """The identity matrix (size, size), in the tensor's library and type."""
    if type(tensor).__module__.partition(".")[0] == "torch":
        import torch

        return torch.eye(size, dtype=tensor.dtype)
    import numpy as np

    return np.eye(size, dtype=tensor.dtype)


def _stored_shape(shape: tuple[int, ...], original: Original) -> tuple[int, ...]:
    shape = shape[::-1] if original.transposed else shape
    return (shape[0] // original.taken * original.parts, *shape[1:]) if original.parts > 1 else shape


def _listed(missing: Iterable[str], unexpected: Iterable[str], misshapen: Iterable[str]) -> str:
    kinds = {"missing:": missing, "unexpected:": unexpected, "of a wrong shape:": misshapen}
    return "; ".join(f"{label} {listing(sorted(names))}" for label, names in kinds.items() if names)


def require_size(config: Any, where: str, key: str = "") -> None:
    """Raises CheckpointError early for a config that would take forever to instantiate."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            require_size(value, where, str(name))
    elif isinstance(config, list | tuple):
        if len(config) > MOST_LAYERS and key.endswith(("_types", "_channels", "_block", "_dim", "_heads")):
            raise CheckpointError(f"{key} has {len(config)} entries", where=where, remedy="Download the config again.")
        for value in config:
            require_size(value, where, key)
    elif isinstance(config, int) and "layers" in key and config > MOST_LAYERS:
        raise CheckpointError(
            f"{key} is {config}, more than {MOST_LAYERS}", where=where, remedy="Download the config again."
        )


def require_loadable(submodels: Mapping[str, SubmodelCheckpoint]) -> None:
    """Raises CheckpointError for the first submodel whose files do not match its configuration, hold tensors of a type
    other than floating point, or hold a tensor twice.

    Pickles, and networks whose parameters only their class knows (`Model.parameters`), are checked on loading.
    """
    opened: dict[Path, WeightsFile] = {}
    seen: list[Mapping[str, Any]] = []
    for name, submodel in submodels.items():
        load = submodel.load
        if load["kind"] != "files" or load["pickled"] or any(load == other for other in seen):
            continue
        seen.append(load)
        for file, _ in files_of(load):
            if file not in opened:
                opened[file] = open_weights(file)
                opened[file].require_read()
        _require(name, load, opened)


def _require(name: str, load: Mapping[str, Any], opened: Mapping[Path, WeightsFile]) -> None:
    part, prefix = part_of(load, name), load.get("prefix") or ""
    held: dict[str, tuple[Path, StoredTensor]] = {}
    for file, begin in files_of(load):
        for bare, entry in opened[file].tensors.items():
            if not bare.startswith(prefix):
                continue
            if (key := f"{begin}{bare}") in held:
                raise CheckpointError(
                    f"{listing([bare])} is also in {held[key][0].name}, and it is unclear which one applies",
                    where=str(file),
                    remedy="Download both files again, or save the model again.",
                )
            held[key] = file, entry
    for key, (file, entry) in held.items():
        if not entry.weights and entry.dtype not in INDEXES:
            raise CheckpointError(
                f"{listing([key])} is of dtype {entry.dtype}: the file is quantized in an unsupported way",
                where=str(file),
                remedy="Use the float16, bfloat16, float8 or GGUF file of this model; a pass of the workflow quantizes "
                "(docs/quantization.md).",
            )
    require_size(load["config"], f"config of {name}")
    parameters = _parameters(part.model, load["config"])
    if parameters is None:
        return
    where = load["files"][0]["path"]
    stored = [(key, entry.shape) for key, (_, entry) in held.items()]
    found = fit(part, stored, parameters, load.get("prefix"), where)
    weights = [entry.weights for _, entry in held.values()]
    if odd := [key for key, place in found.items() if not weights[place.index]]:
        raise CheckpointError(
            f"{listing(odd)} is not of a floating-point type", where=where, remedy="Download the model again."
        )


def _parameters(model: Any, config: Mapping[str, Any]) -> Shapes | None:
    try:
        parameters: Shapes | None = model.parameters(config)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None  # an incomplete config: its class reports what is missing
    return parameters
