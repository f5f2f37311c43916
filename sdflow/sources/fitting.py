"""Which tensor of a file is which parameter of a module: every tensor must find its place, and every parameter its tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families.shared.part import Part
from sdflow.models.base import Original, Shapes
from sdflow.sources.checkpoint import listing


@dataclass(frozen=True)
class Found:
    """A parameter's values: in the tensor of this index in the file, in this part of it."""

    index: int
    original: Original

    def values(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        """Of a torch tensor or a numpy array: the parameter's values in its shape, a view where that can be."""
        original = self.original
        if original.identity:
            return _identity_like(tensor, shape[0])
        if original.parts > 1:
            rows = tensor.shape[0] // original.parts
            tensor = tensor[original.part * rows : (original.part + original.taken) * rows]
        if original.swapped:
            half = tensor.shape[0] // 2
            tensor = tensor.reshape(2, half, *tensor.shape[1:])[[1, 0]]
        if original.transposed:
            tensor = tensor.T
        return tensor.reshape(shape)


def apart(part: Part, load: Mapping[str, Any], parameters: Shapes) -> Iterator[tuple[Part, Mapping[str, Any], Shapes]]:
    """What of a module's parameters is loaded together: the part's own, then those of each adapter.

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
    part: Part,
    stored: Sequence[tuple[str, tuple[int, ...]]],
    parameters: Shapes,
    prefix: str | None,
    where: str,
) -> dict[str, Found]:
    """Key of the module's state_dict -> where its values are.

    stored: name and shape of the file's tensors. parameters: of the whole module. prefix: of the part's tensors in a file
    in the original layout; None for a file with the module's own names.
    Raises CheckpointError naming the tensors that are missing, unexpected or of a wrong shape.
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
                misshapen.append(f"{name} is {list(shape)} where {list(wanted)} belongs")
            found[key] = Found(index, original)
    found |= {key: Found(0, names[key]) for key in names if names[key].identity}
    missing = sorted(set(parameters) - set(found))
    if missing or unexpected or misshapen:
        raise CheckpointError(
            f"its tensors do not fit {model.class_name} as configured; {_listed(missing, unexpected, misshapen)}",
            where=where,
            remedy="The weights and the configuration belong to different models, or the file is incomplete.",
        )
    return found


def _identity_like(tensor: Any, size: int) -> Any:
    """(size, size), of the kind of the tensor: numpy's or torch's."""
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
