"""Weights with LoRAs computed by torch, where they are read: the same bits as `sdflow.weights.bind` writes.

Everything here is exact in any order of additions, as `sdflow.sources.lora.lora_delta` says, or rounds single values as IEEE 754
has it. So a GPU and a CPU come to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sdflow.weights.half import LARGEST, SMALLEST
from sdflow.weights.recipe import Constant, Float16, Join, Recipe, Reshape, Sum, Transpose

if TYPE_CHECKING:
    import torch

    from sdflow.sources.lora import LoraLayer

Read = Callable[[str], "torch.Tensor"]


@dataclass(frozen=True)
class Factors:
    """The factors of a LoRA for one weight, float64, each in two parts so short that their products and the sums of those are
    exact. scale: alpha / rank."""

    high_up: torch.Tensor
    low_up: torch.Tensor
    high_down: torch.Tensor
    low_down: torch.Tensor
    scale: float


@dataclass(frozen=True)
class MergedOnDevice:
    """A checkpoint's tensors with LoRAs merged, as `sdflow.weights.lora.Merged` has them. own: gives a parameter of the
    checkpoint, on the device. factors: of each LoRA, with its scale, in the order in which they are added."""

    own: Read
    factors: Sequence[tuple[Mapping[str, Factors], float]]

    def read(self, key: str) -> torch.Tensor:
        """The values of a parameter; float16 only where it is stored so and no LoRA touches it."""
        values = self.own(key)
        total = None
        for factors, scale in self.factors:
            if scale and key in factors:
                delta = lora_delta(factors[key], scale).view(values.shape)
                total = delta if total is None else total.add_(delta)
        return values if total is None else total.add_(values)


def lora_delta(factors: Factors, scale: float) -> torch.Tensor:
    """What a LoRA adds to a weight, (out, in * kernel height * kernel width): as `sdflow.sources.lora.lora_delta`."""
    import numpy as np
    import torch

    total = factors.high_up @ factors.high_down
    # Two sums, each of them exact; one sum of all terms would be rounded on the way.
    low = torch.hstack([factors.high_up, factors.low_up]) @ torch.vstack([factors.low_down, factors.high_down])
    return total.add_(low).float().mul_(float(np.float32(scale * factors.scale)))


def cut(layers: Mapping[str, LoraLayer], device: torch.device) -> dict[str, Factors]:
    """The layers of a LoRA on the device, in two parts each. All at once: they are small and many."""
    import numpy as np
    import torch

    matrices = [factor for layer in layers.values() for factor in (layer.up, layer.down)]
    if not matrices:
        return {}
    bits = [(53 - (layer.up.shape[1] - 1).bit_length()) // 2 for layer in layers.values() for _ in range(2)]
    units = [
        2.0 ** (int(np.frexp(np.abs(factor).max(initial=0))[1]) - count)
        for factor, count in zip(matrices, bits, strict=True)
    ]
    sizes = [factor.size for factor in matrices]

    def spread(values: Sequence[float]) -> torch.Tensor:
        counts = torch.tensor(sizes, device=device)
        return torch.tensor(values, dtype=torch.float64, device=device).repeat_interleave(counts)

    exact = torch.from_numpy(np.concatenate([factor.reshape(-1) for factor in matrices])).to(device, torch.float64)
    unit, below = spread(units), spread([unit * 2.0**-count for unit, count in zip(units, bits, strict=True)])
    high = torch.round(exact / unit).mul_(unit)
    low = torch.round(exact.sub_(high).div_(below)).mul_(below)
    parts = [
        [part.view(factor.shape) for part, factor in zip(whole.split(sizes), matrices, strict=True)]
        for whole in (high, low)
    ]
    return {
        key: Factors(parts[0][2 * i], parts[1][2 * i], parts[0][2 * i + 1], parts[1][2 * i + 1], layer.scale)
        for i, (key, layer) in enumerate(layers.items())
    }


def evaluate(recipe: Recipe, read: Read, device: torch.device) -> torch.Tensor:
    """The values of a recipe, as `sdflow.weights.recipe.evaluate`; C-contiguous or not."""
    return _evaluate(recipe, read, device, None)


def _evaluate(recipe: Recipe, read: Read, device: torch.device, rounding: Float16 | None) -> torch.Tensor:
    import torch

    if isinstance(recipe, Float16):
        return _evaluate(recipe.of, read, device, recipe)
    if isinstance(recipe, Transpose):
        return _evaluate(recipe.of, read, device, rounding).permute(recipe.axes)
    if isinstance(recipe, Reshape):
        return _evaluate(recipe.of, read, device, rounding).reshape(recipe.shape)
    if isinstance(recipe, Join):
        return torch.cat([_evaluate(part, read, device, rounding) for part in recipe.parts], recipe.axis)
    if isinstance(recipe, Sum):
        values = _added_up([_evaluate(part, read, device, None) for part in recipe.parts])
    elif isinstance(recipe, Constant):
        own = torch.frombuffer(bytearray(recipe.raw), dtype=getattr(torch, recipe.dtype))
        values = own.to(device).view(recipe.shape)
    else:
        values = read(recipe.key)
    if rounding is not None:
        return to_float16(values, rounding.smallest, rounding.largest)
    return values.to(getattr(torch, recipe.dtype))


def _added_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def to_float16(values: torch.Tensor, smallest: float = SMALLEST, largest: float = LARGEST) -> torch.Tensor:
    """As `sdflow.weights.half.to_float16`."""
    import numpy as np
    import torch

    if values.dtype == torch.float16 and smallest <= SMALLEST and largest >= LARGEST:
        return values
    values = values.float()
    half, magnitude = values.half(), values.abs()
    for at_limit, limit in (
        ((magnitude > 0) & (magnitude < float(np.float32(smallest))), smallest),
        ((magnitude > float(np.float32(largest))) & torch.isfinite(magnitude), largest),
    ):
        signed = torch.copysign(torch.full_like(half, float(np.float16(limit))), half)
        half = torch.where(at_limit, signed, half)
    return half
