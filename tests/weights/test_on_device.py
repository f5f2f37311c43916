"""What torch computes where weights are read has the bits that numpy computes for the file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdflow.sources.loras.layers import HadamardLayer, KroneckerLayer, Layer, LoraLayer, Magnitude, lora_delta
from sdflow.weights import on_device
from sdflow.weights.evaluate import evaluate
from sdflow.weights.half import to_float16
from sdflow.weights.lora import Loras, Merged
from sdflow.weights.on_device import Factors, leaves_of, merged
from sdflow.weights.recipe import (
    Bfloat16,
    Constant,
    Float16,
    Join,
    Param,
    Recipe,
    Reshape,
    Scaled,
    Sum,
    SumAlong,
    Transpose,
)

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(0)
W = RANDOM.standard_normal((6, 4)).astype(np.float32)
PARAM, OTHER = Param("w", (6, 4)), Param("half", (6, 4))
VALUES = {"w": W, "half": (W * 1.7).astype(np.float16)}
ZEROS = Constant(np.zeros((6, 4), np.float32).tobytes(), (6, 4), "float32")


def same_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    assert (str(found.dtype), tuple(found.shape)) == (f"torch.{expected.dtype}", expected.shape)
    assert found.contiguous().view(torch.uint8).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "recipe",
    [
        PARAM,
        OTHER,
        Reshape((3, 8), Transpose((1, 0), PARAM)),
        Join(1, (PARAM, ZEROS, OTHER)),
        Float16(5.96e-08, 65504.0, Join(0, (Transpose((1, 0), OTHER), Transpose((1, 0), PARAM)))),
        Float16(1e-1, 1.0, Join(0, (PARAM, ZEROS, OTHER))),
        Bfloat16(Join(0, (Transpose((1, 0), OTHER), Transpose((1, 0), PARAM)))),
        Bfloat16(Sum((PARAM, Sum((PARAM, OTHER))))),
        Float16(5.96e-08, 65504.0, Sum((PARAM, Sum((PARAM, OTHER))))),
        Sum((Float16(5.96e-08, 65504.0, PARAM), Float16(5.96e-08, 65504.0, OTHER))),
        SumAlong(1, ((0,), (3, 1, 2), (1, 1)), SumAlong(0, ((5, 0, 2),), Transpose((0, 1), OTHER))),
        Float16(1e-1, 1.0, SumAlong(0, ((0, 5), (4,)), PARAM)),
        Scaled(-12, OTHER),
        Float16(5.96e-08, 65504.0, Transpose((1, 0), Scaled(-12, PARAM))),
    ],
)
def test_a_recipe(recipe: Recipe) -> None:
    tensors = {key: torch.from_numpy(value) for key, value in VALUES.items()}
    found = merged(leaves_of(recipe), tensors.__getitem__, [])
    same_bits(on_device.evaluate(recipe, found.__getitem__, CPU), evaluate(recipe, VALUES.__getitem__))


@pytest.mark.parametrize(("smallest", "largest"), [(5.96e-08, 65504.0), (1e-3, 2.0)])
def test_rounding_at_the_limits(smallest: float, largest: float) -> None:
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-9, -3e-8, 5.96e-8, 6e-8, 65503.9, 65520.0, -7e4, 1e38, 2.0, 1e-3]
    values = np.array([*edges, *(RANDOM.standard_normal(1000) * 10.0 ** RANDOM.integers(-9, 6, 1000))], np.float32)
    same_bits(on_device.to_float16(torch.from_numpy(values), smallest, largest), to_float16(values, smallest, largest))


def delta(layer: LoraLayer, scale: float) -> torch.Tensor:
    stack, row = Factors({"a": layer}, CPU).places["a"]
    return stack.deltas([row], scale)[0]


@pytest.mark.parametrize("rank", [1, 4, 16, 513])
@pytest.mark.parametrize("of_float16", [True, False])
def test_a_delta(rank: int, of_float16: bool) -> None:
    up = RANDOM.standard_normal((96, rank)) * 10.0 ** RANDOM.integers(-4, 2, (96, rank))
    down = RANDOM.standard_normal((rank, 80))
    stored = np.float16 if of_float16 else np.float32
    layer = LoraLayer(up.astype(stored).astype(np.float32), down.astype(stored).astype(np.float32), 0.3)
    same_bits(delta(layer, 0.7), lora_delta(layer, (96, 80), 0.7))


def test_a_delta_of_zeros() -> None:
    layer = LoraLayer(np.zeros((3, 2), np.float32), np.ones((2, 4), np.float32), 1.0)
    same_bits(delta(layer, 0.5), lora_delta(layer, (3, 4), 0.5))


@pytest.mark.parametrize("most", [1, 48, 1 << 18])
@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_several_loras_are_added_in_their_order(stored: type, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is computed together."""

    class Tensors:
        def read(self, key: str) -> np.ndarray:
            return RANDOM.__class__(np.random.PCG64(7)).standard_normal((6, 4)).astype(stored)

        def file(self, key: str) -> str:
            return key

    def layer() -> LoraLayer:
        return LoraLayer(
            RANDOM.standard_normal((6, 2)).astype(np.float32), RANDOM.standard_normal((2, 4)).astype(np.float32), 0.5
        )

    def wide() -> LoraLayer:
        return LoraLayer(
            RANDOM.standard_normal((6, 3)).astype(np.float32), RANDOM.standard_normal((3, 4)).astype(np.float32), 0.5
        )

    layers = [
        ({"a": layer(), "b": layer(), "d": wide()}, 0.8),
        ({"a": layer()}, 0.0),
        ({"d": layer(), "a": layer()}, -1.3),
    ]
    expected = Merged(Tensors(), Loras(layers))
    factors = [(Factors(held, CPU), scale) for held, scale in layers]
    limits = (5.96e-08, 65504.0)
    monkeypatch.setattr(on_device, "MOST_VALUES", {"cpu": most})
    leaves = [*((key, None) for key in "abcd"), ("b", limits), ("a", limits)]
    found = merged(leaves, lambda key: torch.from_numpy(Tensors().read(key)), factors)
    assert set(found) == set(leaves)
    for key in "abcd":
        same_bits(found[key, None], expected.read(key))
    for key in "ab":
        same_bits(found[key, limits], to_float16(np.asarray(expected.read(key), np.float32), *limits))


def test_other_kinds_have_the_bits_of_the_host_too() -> None:
    """They are computed there, with what plain LoRAs before and after them add."""

    def values(*shape: int) -> np.ndarray:
        return RANDOM.standard_normal(shape).astype(np.float32)

    own = {key: values(6, 4).astype(np.float16 if key == "half" else np.float32) for key in ("dora", "half", "plain")}

    class Tensors:
        def read(self, key: str) -> np.ndarray:
            return own[key]

        def file(self, key: str) -> str:
            return key

    def plain(magnitude: Magnitude | None = None) -> LoraLayer:
        return LoraLayer(values(6, 2), values(2, 4), 0.5, magnitude)

    layers: list[tuple[dict[str, Layer], float]] = [
        ({key: plain() for key in own}, 0.8),
        ({"dora": plain(Magnitude(np.abs(values(6)), 0, True)), "half": KroneckerLayer(values(3, 2), values(2, 2), 1.5)}, 0.6),
        ({"half": HadamardLayer((values(6, 2), values(6, 2)), (values(2, 4), values(2, 4)), 0.5)}, 1.0),
        ({"half": plain(Magnitude(np.abs(values(4)), 1, False)), "dora": plain()}, -0.4),
    ]  # fmt: skip
    expected = Merged(Tensors(), Loras(layers))
    factors = [(Factors(held, CPU), scale) for held, scale in layers]
    found = merged([(key, None) for key in own], lambda key: torch.from_numpy(own[key]), factors)
    for key in own:
        same_bits(found[key, None], expected.read(key))
