"""Merge LoRAs into parameters one at a time, in float32, in the LoRAs' order.

Additive adapters (LoRA, LoHa, LoKr, differences) are summed first: W + sum of scale x delta. A DoRA sets the norms of
the current weight when its turn comes, so its order among other LoRAs matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.families import FAMILIES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sdflow.sources.loras.layers import Layer, LoraLayer
    from sdflow.weights.layout import Tile
    from sdflow.weights.tensors import Tensors


@dataclass(frozen=True)
class LoraInput:
    """A LoRA file on disk and the scale to merge it at."""

    path: Path
    scale: float


@dataclass(frozen=True)
class Loras:
    """LoRA layers for a submodel, each as (state_dict key -> layer, scale), in merge order."""

    layers: Sequence[tuple[Mapping[str, Layer], float]] = ()

    @property
    def touched(self) -> frozenset[str]:
        """The parameters that any LoRA changes. A LoRA at scale 0 changes none."""
        return frozenset(key for layers, scale in self.layers if scale for key in layers)

    @property
    def counts(self) -> list[int]:
        """Number of parameters that each LoRA changes."""
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
        """Return a parameter's values; float16 only if stored so and untouched by LoRAs."""
        values = self.tensors.read(key)
        return merged_weight(values, self._layers(key))

    def tiles(self, key: str, width: int, transposed: bool) -> Iterator[Tile]:
        """Yield the same values as tiles of a matrix with rows of this width; in their stored type if untouched by LoRAs.

        transposed: the matrix is written transposed.
        """
        from sdflow.sources.loras.layers import LoraLayer
        from sdflow.weights.layout import tiles

        layers, plain = self._layers(key), []
        for layer, scale in layers:
            if not isinstance(layer, LoraLayer) or layer.magnitude is not None:
                return tiles((self.read(key).reshape(-1),), width, transposed)
            plain.append((layer, scale))
        found = tiles(self.tensors.blocks(key), width, transposed)
        return _merged_tiles(found, plain) if plain else found

    def _layers(self, key: str) -> list[tuple[Layer, float]]:
        return [(found[key], scale) for found, scale in self.loras.layers if scale and key in found]


def _merged_tiles(tiles: Iterator[Tile], layers: Sequence[tuple[LoraLayer, float]]) -> Iterator[Tile]:
    """Tiles of a weight with these LoRAs merged, in float32: the bits of `merged_weight`, which has all of it in memory."""
    from sdflow.weights.half import add_to

    products = [layer.tiles(scale) for layer, scale in layers]
    for rows, columns, values in tiles:
        merged = products[0](rows, columns)
        for product in products[1:]:
            merged += product(rows, columns)
        add_to(merged, values)
        yield rows, columns, merged


def merged_weight(values: NDArray[Any], layers: Sequence[tuple[Layer, float]]) -> NDArray[Any]:
    """Merge layers at their scales into a weight, one after the other. Returns float32, or the unchanged values without
    layers."""
    from sdflow.sources.loras.layers import lora_delta
    from sdflow.weights.dora import with_norms
    from sdflow.weights.half import add_to

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
