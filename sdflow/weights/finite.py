"""Reject NaN and infinite weights, naming the file they come from, and count values that float16 clamps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdflow.artifact import Facts
from sdflow.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sdflow.weights.half import AtLimit
    from sdflow.weights.lora import LoraInput, Loras, Merged
    from sdflow.weights.recipe import Recipe

NAMED = 5
"""Maximum number of clamped weights to name."""

_AND = " and "  # between the parameters of one weight


def all_finite(values: NDArray[Any]) -> bool:
    """Whether floating-point values are finite, in one pass: a sum with a non-finite value is non-finite."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None)) or np.isfinite(values).all())


@dataclass(frozen=True)
class FiniteWeights:
    """Checks a model's weights as they are computed, from several threads. cut: number of clamped values by weight."""

    merged: Merged
    loras: Sequence[LoraInput]
    cut: dict[str, int] = field(default_factory=dict)

    def look_at(self, recipe: Recipe, values: NDArray[Any], counts: AtLimit) -> None:
        """Raise CheckpointError if a value is not finite. counts: of float16 values."""
        if counts.cut:
            self.cut[_AND.join(_keys(recipe))] = counts.cut
        if counts.not_finite or (values.dtype == "float32" and not all_finite(values)):
            raise self._refused(recipe)

    def facts(self) -> Facts:
        """Return `beyond_float16`: number of values and weights, and the weights with most; empty without any."""
        keys = {key for name in self.cut for key in name.split(_AND)}
        touching = enumerate(self.merged.loras.layers)
        by = [index for index, (layers, scale) in touching if scale and keys & layers.keys()]
        return beyond_float16(self.cut, by)

    def _refused(self, recipe: Recipe) -> CheckpointError:
        keys = _keys(recipe)
        for key in keys:
            values = self.merged.tensors.read(key)
            if not all_finite(values):
                return CheckpointError(
                    f"{_not_finite(values)} of {key} are NaN or infinite",
                    where=self.merged.tensors.file(key),
                    remedy="The file is damaged, or comes from a failed training run: use another one.",
                )
            if refused := refused_lora(key, values.shape, self.merged.loras, self.loras):
                return refused
        return CheckpointError(f"the values computed from {' and '.join(keys)} are not finite")


def refused_lora(key: str, shape: tuple[int, ...], held: Loras, files: Sequence[LoraInput]) -> CheckpointError | None:
    """Return an error for the LoRA that makes a weight non-finite, or for all that change it if none does alone; None
    if none does."""
    import numpy as np

    from sdflow.sources.loras.layers import lora_delta

    touching = []
    for (layers, scale), file in zip(held.layers, files, strict=True):
        if not scale or key not in layers:
            continue
        touching.append(file)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = lora_delta(layers[key], shape, scale)
        if not all_finite(delta):
            return CheckpointError(
                f"at scale {scale:g}, {_not_finite(delta)} added to {key} are NaN or infinite",
                where=str(file.path),
                remedy="Use a scale around 1. If it already is, the file's factors or alpha are damaged.",
            )
    if not touching:
        return None
    return CheckpointError(
        f"merged, {key} is not finite",
        where=", ".join(str(file.path) for file in touching),
        remedy="Use scales around 1.",
    )


def beyond_float16(cut: Mapping[str, int], loras: Sequence[int] = ()) -> Facts:
    """Return the fact `beyond_float16` for these counts. loras: indices of LoRAs that change one of these weights."""
    if not cut:
        return {}
    most = dict(sorted(cut.items(), key=lambda item: (-item[1], item[0]))[:NAMED])
    return {"beyond_float16": {"values": sum(cut.values()), "weights": len(cut), "most": most, "loras": list(loras)}}


def words_beyond_float16(facts: Facts, loras: Sequence[str], model: str) -> str | None:
    """Describe the fact `beyond_float16`, if present. loras: all files with scales. model: the checkpoint's file."""
    if not (found := facts.get("beyond_float16")):
        return None
    most = ", ".join(f"{name} ({count:,})" for name, count in found["most"].items())
    more = f" and {found['weights'] - len(found['most']):,} more" if found["weights"] > len(found["most"]) else ""
    files = ", ".join(loras[index] for index in found["loras"]) or model
    return f"{found['values']:,} values exceed float16's range and were clamped to 65,504: {most}{more}, from {files}"


def _keys(recipe: Recipe) -> list[str]:
    from sdflow.weights.recipe import params

    return sorted({param.key for param in params(recipe)})


def _not_finite(values: NDArray[Any]) -> str:
    import numpy as np

    return f"{np.count_nonzero(~np.isfinite(values)):,} of {values.size:,} values"
