"""Parameters with LoRAs merged into them, one at a time, in float32, in the order of the LoRAs.

What only adds, LoRA, LoHa, LoKr and differences, is summed up first: W + sum of scale x delta. A DoRA sets the norms of what is
there when its turn comes, so it makes a difference whether another LoRA comes before or after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.families import FAMILIES
from sdflow.sources.loras.layers import Layer, Magnitude, lora_delta
from sdflow.weights.half import add_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sdflow.weights.tensors import Tensors

    Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LoraInput:
    """A LoRA file on disk and the scale to merge it at."""

    path: Path
    scale: float


@dataclass(frozen=True)
class Loras:
    """What LoRAs hold for a submodel, (state_dict key -> layer, scale) each, in the order in which they are added."""

    layers: Sequence[tuple[Mapping[str, Layer], float]] = ()

    @property
    def touched(self) -> frozenset[str]:
        """The parameters that any of them changes. A LoRA at scale 0 changes none."""
        return frozenset(key for layers, scale in self.layers if scale for key in layers)

    @property
    def counts(self) -> list[int]:
        """How many parameters each changes."""
        return [len(layers) if scale else 0 for layers, scale in self.layers]


def read_loras(
    submodel: str, loras: Sequence[LoraInput], parameters: Mapping[str, tuple[int, ...]], family: str
) -> Loras:
    """Read the LoRAs' layers for a submodel. Raises CheckpointError for a tensor that has no place in it."""
    if not loras:
        return Loras()
    from sdflow.sources.loras.lora import read_lora

    if submodel not in FAMILIES[family].with_loras:
        return Loras()
    return Loras([(read_lora(lora.path, {submodel: parameters}, family)[submodel], lora.scale) for lora in loras])


@dataclass(frozen=True)
class Merged:
    """A checkpoint's tensors with LoRAs merged."""

    tensors: Tensors
    loras: Loras

    def read(self, key: str) -> NDArray[Any]:
        """The values of a parameter; float16 only where it is stored so and no LoRA touches it."""
        values = self.tensors.read(key)
        return merged_weight(values, self._layers(key))

    def blocks(self, key: str) -> Iterator[NDArray[Any]]:
        """The same values in row-major order, in flat blocks; where no LoRA touches them, of the type that they are stored in."""
        return iter((self.read(key).reshape(-1),)) if self._layers(key) else self.tensors.blocks(key)

    def _layers(self, key: str) -> list[tuple[Layer, float]]:
        return [(found[key], scale) for found, scale in self.loras.layers if scale and key in found]


def merged_weight(values: NDArray[Any], layers: Sequence[tuple[Layer, float]]) -> NDArray[Any]:
    """A weight with these layers merged at their scales, one after the other: float32; the values as they are where there is no
    layer."""
    total: NDArray[Any] | None = None
    for layer, scale in layers:
        if layer.magnitude is None:
            delta = lora_delta(layer, values.shape, scale)
            if total is None:
                total = delta
            else:
                total += delta
            continue
        if total is not None:
            add_to(total, values)
            values, total = total, None
        values = with_norms(values, layer, scale)
    if total is None:
        return values
    add_to(total, values)
    return total


_BLOCK = 1 << 18
"""Values that are looked at at a time."""


def with_norms(values: NDArray[Any], layer: Layer, scale: float) -> Floats:
    """A weight with such an adapter merged, at this scale."""
    magnitude = layer.magnitude
    assert magnitude is not None, "the layer is a DoRA's"
    blended = magnitude.blends and scale != 1
    merged = lora_delta(layer, values.shape, 1.0 if magnitude.blends else scale)
    add_to(merged, values)
    _set_norms(merged, magnitude)
    if blended:
        before = values.astype(np.float32)
        merged -= before
        merged *= np.float32(scale)
        merged += before
    return merged


def _set_norms(values: Floats, magnitude: Magnitude) -> None:
    """In place. A row or column of zeros stays what it is."""
    rows = np.moveaxis(values, magnitude.axis, 0)
    found = norms(rows)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = np.where(found > 0, magnitude.values / found, np.float32(1))
    rows *= factors.reshape(-1, *[1] * (rows.ndim - 1))


def norms(rows: Floats) -> Floats:
    """The Euclidean norm of each entry along the first axis, rounded to float32 once."""
    width = max(1, rows[0].size)
    bits = (53 - (width - 1).bit_length()) // 2
    found = np.empty(len(rows), np.float32)
    step = max(1, _BLOCK // width)
    for begin in range(0, len(rows), step):
        exact = rows[begin : begin + step].reshape(-1, width).astype(np.float64)
        units = np.ldexp(1.0, np.frexp(np.abs(exact).max(axis=1))[1] - bits)[:, None]
        # Two whole numbers for each value, so short that their squares and the sums of those are exact.
        with np.errstate(invalid="ignore", over="ignore"):
            exact /= units
            high = np.rint(exact)
            low = np.rint((exact - high) * 2.0**bits)
            squares = (high * high).sum(axis=1)
            squares += 2.0 ** (1 - bits) * (high * low).sum(axis=1)
            squares += 4.0**-bits * (low * low).sum(axis=1)
            found[begin : begin + step] = np.sqrt(squares) * units[:, 0]
    return found
