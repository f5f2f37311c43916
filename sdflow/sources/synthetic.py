"""`synthetic:sd15?seed=N`: an architecture with random weights, generated on demand and never stored.

Each tensor has its own generator, seeded by (seed, class, tensor name), so its values are independent of order and of
other tensors. They are uniform, computed from PCG64's raw output, which NumPy guarantees across versions (NEP 19), with
one multiplication and one addition in float32: bit-identical on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from math import prod, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sdflow.errors import CheckpointError
from sdflow.families import ADAPTER_ARCHITECTURES, COMPONENT_ARCHITECTURES, family_of_architecture
from sdflow.families.shared.part import Part
from sdflow.models.base import Model
from sdflow.sources.architectures import architecture_config, architecture_index, companion_folders
from sdflow.sources.checkpoint import (
    Checkpoint,
    SubmodelCheckpoint,
    config_digest,
    pipeline_facts,
    read_options,
    submodels_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATOR_VERSION = 1
"""Part of the identity: increase it when values change, or `Model.random_version` when those of one class do."""
_CHUNK = 1 << 20
_CACHED = 1 << 16
"""Values computed at a time, which stay in the processor's cache; an even number."""


def open_synthetic(reference: str, architecture: str, seed: int, *, left_out: Collection[str] = ()) -> Checkpoint:
    """Open the shipped architecture with weights from `seed`. left_out: optional components to omit. Raises
    CheckpointError for a single-component architecture."""
    require_model(reference, architecture)
    family = family_of_architecture(architecture)
    index = architecture_index(architecture)
    configs = {
        name: architecture_config(architecture, name)
        for name in family.components
        if index.get(name, [None])[0] and not (name in left_out and name in family.omittable)
    }

    def build(part: Part, config: Mapping[str, Any]) -> SubmodelCheckpoint:
        return synthetic_submodel(part.model, config, seed, family.name)

    submodels = submodels_of(family, configs, read_options(family, index), build)
    return Checkpoint(
        family=family,
        reference=reference,
        provenance=synthetic_provenance(architecture, seed, submodels),
        submodels=submodels,
        companions=companion_folders(architecture, family.companions, submodels),
        facts={
            **pipeline_facts(family, {**configs, "scheduler": architecture_config(architecture, "scheduler")}),
            "requires_safety_checker": family.checker in submodels,
        },
        index=index,
        options=read_options(family, index),
    )


def require_model(reference: str, architecture: str) -> None:
    """Raises CheckpointError, with the reference as `where`, for an architecture other than a whole model's."""
    if architecture in COMPONENT_ARCHITECTURES:
        component = COMPONENT_ARCHITECTURES[architecture]
        raise CheckpointError(
            f"is only a {component}", where=reference, remedy=f"Name it as `components: {{{component}: {reference}}}`."
        )
    if architecture in ADAPTER_ARCHITECTURES:
        raise CheckpointError(
            "is an IP-Adapter", where=reference, remedy=f"Name it as `ip_adapters: [{{file: {reference}}}]`."
        )


def synthetic_provenance(
    architecture: str, seed: int, submodels: Mapping[str, SubmodelCheckpoint] = MappingProxyType({})
) -> dict[str, Any]:
    """JSON for the manifest."""
    versions = (each.identity["generator"] for each in submodels.values())
    return {
        "kind": "synthetic",
        "architecture": architecture,
        "seed": seed,
        "generator": max(versions, default=GENERATOR_VERSION),
    }


def synthetic_submodel(model: Model, config: Mapping[str, Any], seed: int, family: str) -> SubmodelCheckpoint:
    """A submodel with random weights."""
    return SubmodelCheckpoint(
        identity={
            "kind": "synthetic",
            "class": model.class_name,
            "config": config_digest(config),
            "seed": seed,
            "generator": max(GENERATOR_VERSION, model.random_version),
        },
        load={"kind": "synthetic", "family": family, "config": config, "seed": seed},
    )


def synthetic_tensors(model: Model, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, NDArray[np.float32]]:
    """Random float32 weights for the parameters of a model, scaled to keep activations near 1."""
    import numpy as np

    tensors = {}
    for name, shape in shapes.items():
        values = np.empty(prod(shape), np.float32)
        _fill(values, _bits(model, name, seed), *_distribution(model, name, shape))
        tensors[name] = values.reshape(shape)
    return tensors


def _bits(model: Model, name: str, seed: int) -> np.random.PCG64:
    import numpy as np

    stream = f"sdflow-synthetic/{GENERATOR_VERSION}/{seed}/{model.class_name}/{name}"
    key = hashlib.sha256(stream.encode()).digest()
    return np.random.PCG64(int.from_bytes(key, "little"))


def _distribution(model: Model, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's values."""
    if name.endswith("embeds_weights"):
        # Thresholds of the safety checker above any cosine, so that random weights flag nothing.
        return 1.2, 0.1
    if name.endswith(("_embedding", "token_embedding.weight", "position_embedding.weight")):
        return 0.0, 0.02
    if len(shape) > 1:
        return 0.0, model.random_gain(name) / sqrt(prod(shape[1:]))
    return (0.0, 0.05) if name.endswith("bias") else (1.0, 0.1)


def _fill(values: NDArray[np.float32], bits: np.random.PCG64, mean: float, deviation: float) -> None:
    """Fill a flat array with the next numbers of `bits`; its length must be even unless it is the last."""
    import numpy as np

    step = np.float32(deviation * sqrt(12.0) / 2**24)
    low = np.float32(mean - deviation * sqrt(3.0))
    for begin in range(0, len(values), _CACHED):
        some = values[begin : begin + _CACHED]
        words = bits.random_raw((len(some) + 1) // 2).astype("<u8", copy=False).view("<u4")[: len(some)]
        words >>= np.uint32(8)
        some[:] = words.view("<i4")  # 24 bits fit into float32; converting signed integers is faster
        some *= step
        some += low


def tensors_for(model: Model, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights for a module with parameters of these names and shapes, regardless of the prefixes that its transformers
    release uses."""
    names = {name: model.current_name(name) for name in shapes}
    tensors = synthetic_tensors(model, {names[name]: shape for name, shape in shapes.items()}, seed)
    return {name: tensors[names[name]] for name in shapes}


def blocks_of(model: Model, name: str, shape: tuple[int, ...], seed: int) -> Iterator[NDArray[np.float32]]:
    """The values of `tensors_for` for one parameter, in row-major order, in flat blocks."""
    import numpy as np

    current, count = model.current_name(name), prod(shape)
    bits = _bits(model, current, seed)
    for begin in range(0, count, _CHUNK):
        values = np.empty(min(_CHUNK, count - begin), np.float32)
        _fill(values, bits, *_distribution(model, current, shape))
        yield values
