"""What a LoRA adds to a weight has the same bits on every machine."""

from __future__ import annotations

import numpy as np
import pytest

from sdflow.sources.loras import products
from sdflow.sources.loras.layers import LoraLayer, lora_delta
from sdflow.weights import layout
from sdflow.weights.half import numpy_type
from sdflow.weights.lora import Loras, Merged
from sdflow.weights.tensors import Tensors


@pytest.mark.parametrize("rank", [1, 4, 16, 128, 513])
def test_a_delta_does_not_depend_on_the_order_of_its_sums(rank: int) -> None:
    """Another order of the ranks is what another processor or another BLAS amounts to."""
    random = np.random.default_rng(rank)
    up = random.standard_normal((96, rank)).astype(np.float32) * np.float32(10) ** random.integers(-4, 2, (96, rank))
    down = random.standard_normal((rank, 80)).astype(np.float32)
    up = up.astype(np.float32)
    first = lora_delta(LoraLayer(up, down, 1.0), (96, 80), 1.0)
    for _ in range(5):
        order = random.permutation(rank)
        again = lora_delta(LoraLayer(up[:, order], down[order], 1.0), (96, 80), 1.0)
        np.testing.assert_array_equal(first.view(np.uint32), again.view(np.uint32))
    exact = up.astype(np.float64) @ down.astype(np.float64)
    np.testing.assert_allclose(first, exact, rtol=1e-7, atol=1e-10 * np.abs(exact).max())


def test_a_factor_of_zeros_adds_zeros() -> None:
    delta = lora_delta(LoraLayer(np.zeros((3, 2), np.float32), np.ones((2, 4), np.float32), 1.0), (3, 4), 0.5)
    assert not delta.any()


@pytest.mark.parametrize("wide", [False, True])
def test_the_short_way_for_float16_gives_the_bits_of_the_long_one(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    random = np.random.default_rng(3)
    up, down = (random.standard_normal(shape).astype(np.float16).astype(np.float32) for shape in ((96, 16), (16, 200)))
    up[[5, 40]] *= 1e-6  # rows and columns whose bits do not fit into the high parts
    down[:, [0, 7, 199]] *= 3e-6
    if wide:
        down += random.standard_normal(down.shape).astype(np.float32) * 1e-7
    layer = LoraLayer(up, down, 1.0)
    short = lora_delta(layer, (96, 200), 0.7)
    monkeypatch.setattr(products, "MOST_WITH_LOW_PARTS", -1.0)
    np.testing.assert_array_equal(short.view(np.uint32), lora_delta(layer, (96, 200), 0.7).view(np.uint32))


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_tiles_of_a_merged_weight_have_the_bits_of_the_whole(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their size: also where a block of the file ends within a row."""
    monkeypatch.setattr(layout, "VALUES", 200)
    monkeypatch.setattr(layout, "COLUMNS", 9)
    random = np.random.default_rng(0)
    for shape in ((37, 53), (70, 8, 3, 3), (2, 900)):
        values = random.standard_normal(shape).astype(np.float32).astype(numpy_type(stored))
        flat, factors = values.reshape(-1), ((shape[0], 4), (4, values[0].size))
        loras = [
            ({"k": LoraLayer(*(random.standard_normal(each).astype(np.float32) for each in factors), 0.5)}, scale)
            for scale in (0.8, -0.3)
        ]
        for size in (7, 1000, flat.size):
            cut = [flat[begin : begin + size] for begin in range(0, flat.size, size)]
            whole = values if stored == "float16" else values.astype(np.float32)
            tensors = Tensors(lambda key, whole=whole: whole, lambda key, cut=cut: iter(cut), lambda key: "")
            for count, transposed in ((1, False), (1, True), (2, True)):
                merged = Merged(tensors, Loras(loras[:count]))
                found = np.full((shape[0], values[0].size), np.nan, np.float32)
                for rows, columns, tile in merged.tiles("k", found.shape[1], transposed):
                    assert np.isnan(found[rows, columns]).all(), "each value comes once"
                    found[rows, columns] = tile
                np.testing.assert_array_equal(
                    found.view(np.uint32), merged.read("k").reshape(found.shape).view(np.uint32)
                )
