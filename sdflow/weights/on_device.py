"""Compute weights with LoRAs in torch on the device that reads them, with the same bits as `sdflow.weights.bind`.

Everything is exact in any order of additions, as in `sdflow.sources.loras.layers.lora_delta`, or rounds single values
by IEEE 754, so GPU and CPU results are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sdflow.weights.hadamard import rotated
from sdflow.weights.half import LARGEST, SMALLEST
from sdflow.weights.quantized import KINDS
from sdflow.weights.recipe import (
    Bfloat16,
    Blockwise,
    Constant,
    Join,
    Quantized,
    Quantizing,
    Recipe,
    Reshape,
    Rotated,
    Rounded,
    Scaled,
    Scales,
    Sum,
    SumAlong,
    Transpose,
)  # fmt: skip

if TYPE_CHECKING:
    import torch

    from sdflow.sources.loras.layers import Layer, LoraLayer

Rounding = tuple[float, float] | Literal["bfloat16"] | None
"""Rounding to float16: its smallest and largest magnitudes. None: no rounding."""

Leaf = tuple[str, Rounding]
"""A parameter and its rounding, as read by a recipe."""

ReadLeaf = Callable[[Leaf], "torch.Tensor"]

MOST_VALUES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Maximum number of weight values computed at once: fits a CPU's cache; saturates a GPU with few launches."""


@dataclass(frozen=True, eq=False)
class _Stack:
    """Factors of layers with equal shapes. up: (layers, out, rank), float32; down: (layers, rank, in). up_unit,
    down_unit: (layers, 1, 1), float64: units in which values become integers. scale: alpha / rank of each."""

    up: torch.Tensor
    down: torch.Tensor
    up_unit: torch.Tensor
    down_unit: torch.Tensor
    scale: Sequence[float]
    bits: int

    def deltas(self, rows: Sequence[int], scale: float) -> torch.Tensor:
        """Return these layers' deltas, (layers, out, in), like `sdflow.sources.loras.layers.lora_delta`."""
        import numpy as np
        import torch

        index = torch.tensor(rows, device=self.up.device)
        high_up, low_up = _halves(self.up[index], self.up_unit[index], self.bits)
        high_down, low_down = _halves(self.down[index], self.down_unit[index], self.bits)
        total = torch.bmm(high_up, high_down)
        # Two exact sums; a single sum of all terms would be rounded.
        total.add_(torch.bmm(torch.cat([high_up, low_up], 2), torch.cat([low_down, high_down], 1)))
        scales = [float(np.float32(scale * self.scale[row])) for row in rows]
        return total.float().mul_(torch.tensor(scales, device=index.device)[:, None, None])


def _halves(values: torch.Tensor, unit: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split values into two parts short enough that sums of their products are exact in float64."""
    import torch

    exact, below = values.double(), unit * 2.0**-bits
    high = torch.round(exact / unit).mul_(unit)
    return high, torch.round(exact.sub_(high).div_(below)).mul_(below)


class Factors:
    """A LoRA's factors on a device, stacked by shape because they are small and many. layers: the whole LoRA, by
    parameter."""

    def __init__(self, layers: Mapping[str, Layer], device: torch.device) -> None:
        from sdflow.sources.loras.layers import LoraLayer as Plain

        self.layers = layers
        self.places: dict[str, tuple[_Stack, int]] = {}
        """Parameter -> location of its factors. Layers other than plain LoRAs are merged on the host."""
        alike: dict[tuple[tuple[int, ...], ...], list[tuple[str, LoraLayer]]] = {}
        for key, layer in layers.items():
            if isinstance(layer, Plain) and layer.magnitude is None:
                alike.setdefault((layer.up.shape, layer.down.shape), []).append((key, layer))
        for same in alike.values():
            stack = _stacked([layer for _, layer in same], device)
            self.places |= {key: (stack, row) for row, (key, _) in enumerate(same)}


def _stacked(layers: Sequence[LoraLayer], device: torch.device) -> _Stack:
    import numpy as np
    import torch

    bits = (53 - (layers[0].up.shape[1] - 1).bit_length()) // 2

    def stack(factors: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.from_numpy(np.stack(factors).astype(np.float32, copy=False)).to(device)
        largest = values.abs().flatten(1).amax(1).cpu().numpy()
        units = torch.from_numpy(np.ldexp(1.0, np.frexp(largest)[1] - bits))
        return values, units.to(device)[:, None, None]

    (up, up_unit), (down, down_unit) = stack([each.up for each in layers]), stack([each.down for each in layers])
    return _Stack(up, down, up_unit, down_unit, [each.scale for each in layers], bits)


def merged(
    leaves: Iterable[Leaf], own: Callable[[str], torch.Tensor], factors: Sequence[tuple[Factors, float]]
) -> dict[Leaf, torch.Tensor]:
    """Return checkpoint parameters with LoRAs merged, like `sdflow.weights.lora.Merged`; similar ones are batched.

    own: returns a checkpoint parameter on the device. factors: each LoRA with its scale, in merge order. Unrounded
    parameters are float16 only if stored so and untouched by LoRAs.
    """
    roundings: dict[str, list[Rounding]] = {}
    for key, rounding in dict.fromkeys(leaves):
        roundings.setdefault(key, []).append(rounding)
    alike: dict[tuple[Any, ...], list[str]] = {}
    found: dict[Leaf, torch.Tensor] = {}
    for key, wanted in roundings.items():
        layers = [(held.layers[key], scale) for held, scale in factors if scale and key in held.layers]
        if any(scale and key in held.layers and key not in held.places for held, scale in factors):
            whole = _on_host(own(key), layers)
            found |= {(key, rounding): _rounded(whole, rounding) for rounding in wanted}
            continue
        touching = tuple(
            (number, held.places[key][0])
            for number, (held, scale) in enumerate(factors)
            if scale and key in held.places
        )
        if touching:
            alike.setdefault((tuple(wanted), touching), []).append(key)
        else:
            found |= {(key, rounding): _rounded(own(key), rounding) for rounding in wanted}
    for (wanted, touching), keys in alike.items():
        values = own(keys[0])
        step = max(1, MOST_VALUES[values.device.type] // max(1, values.numel()))
        for begin in range(0, len(keys), step):
            together, total = keys[begin : begin + step], None
            for number, stack in touching:
                held, scale = factors[number]
                deltas = stack.deltas([held.places[key][1] for key in together], scale)
                total = deltas if total is None else total.add_(deltas)
            assert total is not None, "something touches it"
            for row, key in zip(total, together, strict=True):
                row.add_(own(key).view(row.shape))
            for rounding in wanted:
                rows = zip(together, _rounded(total, rounding), strict=True)
                found |= {(key, rounding): row.view(own(key).shape) for key, row in rows}
    return found


def _on_host(values: torch.Tensor, layers: Sequence[tuple[Layer, float]]) -> torch.Tensor:
    """Merge with numpy, which gives the same bits as bound weights."""
    import torch

    from sdflow.weights.lora import merged_weight

    return torch.from_numpy(merged_weight(values.cpu().numpy(), layers)).to(values.device)


def _rounded(values: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    if rounding is None:
        return values
    return values.bfloat16() if rounding == "bfloat16" else to_float16(values, *rounding)


def _rounding(recipe: Rounded) -> Rounding:
    return "bfloat16" if isinstance(recipe, Bfloat16) else (recipe.smallest, recipe.largest)


def leaves_of(recipe: Recipe, rounding: Rounding = None) -> Iterator[Leaf]:
    """Yield the parameters that a recipe reads, with their rounding, which is applied first, as in
    `sdflow.weights.evaluate.evaluate`."""
    if isinstance(recipe, Rounded):
        yield from leaves_of(recipe.of, _rounding(recipe))
    elif isinstance(recipe, Join):
        for part in recipe.parts:
            yield from leaves_of(part, rounding)
    elif isinstance(recipe, Sum):
        for part in recipe.parts:
            yield from leaves_of(part)
    elif isinstance(recipe, SumAlong | Scaled | Rotated | Quantizing):
        yield from leaves_of(recipe.of)
    elif isinstance(recipe, Transpose | Reshape):
        yield from leaves_of(recipe.of, rounding)
    elif not isinstance(recipe, Constant):
        yield recipe.key, rounding


def evaluate(recipe: Recipe, read: ReadLeaf, device: torch.device) -> torch.Tensor:
    """Evaluate a recipe like `sdflow.weights.evaluate.evaluate`; the result may be non-contiguous. read: returns its
    leaves.

    Blockwise weights are not supported: their readers only take constants (`sdflow.serve.loras.live_loras.READERS`).
    """
    return _evaluate(recipe, read, device, None)


def _evaluate(recipe: Recipe, read: ReadLeaf, device: torch.device, rounding: Rounding) -> torch.Tensor:
    import torch

    if isinstance(recipe, Rounded):
        return _evaluate(recipe.of, read, device, _rounding(recipe))
    if isinstance(recipe, Quantized | Scales):
        return _quantized(recipe, _evaluate(recipe.of, read, device, None), device)
    if isinstance(recipe, Rotated):
        exact = _evaluate(recipe.of, read, device, None).float().cpu().numpy()
        return _rounded(torch.from_numpy(rotated(exact, recipe.axis, recipe.size)).to(device), rounding)
    if isinstance(recipe, Transpose):
        return _evaluate(recipe.of, read, device, rounding).permute(recipe.axes)
    if isinstance(recipe, Reshape):
        return _evaluate(recipe.of, read, device, rounding).reshape(recipe.shape)
    if isinstance(recipe, Join):
        return torch.cat([_evaluate(part, read, device, rounding) for part in recipe.parts], recipe.axis)
    if isinstance(recipe, Sum):
        values = _added_up([_evaluate(part, read, device, None) for part in recipe.parts])
    elif isinstance(recipe, SumAlong):
        whole = _evaluate(recipe.of, read, device, None)
        groups = ([whole.select(recipe.axis, entry) for entry in group] for group in recipe.groups)
        values = torch.stack([_added_up(group) for group in groups], recipe.axis)
    elif isinstance(recipe, Scaled):
        values = _evaluate(recipe.of, read, device, None).float() * 2.0**recipe.power
    elif isinstance(recipe, Constant):
        own = torch.frombuffer(bytearray(recipe.raw), dtype=getattr(torch, recipe.dtype))
        values = own.to(device).view(recipe.shape)
    else:
        assert not isinstance(recipe, Blockwise), "no such weight is an input of a graph"
        values = read((recipe.key, rounding))
        return values if rounding is not None else values.to(getattr(torch, recipe.dtype))
    return values.to(getattr(torch, recipe.dtype)) if rounding is None else _rounded(values, rounding)


def _quantized(recipe: Quantized | Scales, exact: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Quantize with numpy on the host, which gives the same bits as bound weights."""
    import numpy as np
    import torch

    kind, values = KINDS[recipe.kind], exact.cpu().numpy()
    scales = kind.scales(values, recipe.axis)
    if isinstance(recipe, Scales):
        return torch.from_numpy(scales).to(device)
    made = np.ascontiguousarray(kind.quantize(values, scales, recipe.axis))
    return torch.from_numpy(made.view(np.uint8)).view(getattr(torch, kind.dtype)).to(device)


def _added_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def to_float16(values: torch.Tensor, smallest: float = SMALLEST, largest: float = LARGEST) -> torch.Tensor:
    """See `sdflow.weights.half.to_float16`."""
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
