"""Weights by blocks: the bytes of ONNX Runtime's own quantizer, the nearest numbers, and scales that are never worse."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

from sdflow.verify.artifact.blocks_again import blocks_again, one_thread
from sdflow.weights.blockwise import PARTS, Blocks, Format, Lately, quantize
from sdflow.weights.evaluate import evaluate
from sdflow.weights.recipe import Blockwise, Param, Transpose
from sdflow.weights.recipe_json import from_json, to_json

SIZES = st.sampled_from([16, 32, 64, 128])
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 5))


def weights(seed: int, rows: int, columns: int) -> np.ndarray:
    """Of many magnitudes; a row of zeros, rows of one sign, halves between two numbers, and blocks of one value."""
    random = np.random.default_rng(seed)
    made = random.standard_normal((rows, columns)) * np.exp(2 * random.standard_normal((rows, 1)))
    kind = random.integers(0, 6, rows)
    made[kind == 1] = np.abs(made[kind == 1])
    made[kind == 2] = 0
    made[kind == 3] = np.rint(4 * made[kind == 3]) / 4
    made[kind == 4] = made[kind == 4, :1]
    result: np.ndarray = made.astype(np.float32)
    return result


def numbers(blocks: Blocks, how: Format) -> tuple[np.ndarray, np.ndarray]:
    """Values and zeros, unpacked by torch: (N, blocks, size) and (N, blocks)."""
    rows, count = blocks.scales.shape
    values, zeros = torch.from_numpy(blocks.values.copy()), torch.from_numpy(blocks.zeros.copy())
    if how.bits == 4:
        values, zeros = (torch.stack([each & 15, each >> 4], -1).flatten(-2) for each in (values, zeros))
    return values.reshape(rows, count, how.size).numpy(), zeros.reshape(rows, -1)[:, :count].numpy()


def dequantized(blocks: Blocks, how: Format) -> np.ndarray:
    values, zeros = numbers(blocks, how)
    off: np.ndarray = values.astype(np.float64) - zeros[..., None]
    return (off * blocks.scales[..., None].astype(np.float64)).reshape(len(values), -1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), SHAPES, SIZES, st.sampled_from([4, 8]), st.booleans())
def test_rounding_to_nearest_gives_the_bytes_of_onnx_runtime(
    seed: int, shape: tuple[int, int], size: int, bits: int, symmetric: bool
) -> None:
    weight = weights(seed, shape[0], shape[1] * size)
    config = DefaultWeightOnlyQuantConfig(block_size=size, is_symmetric=symmetric, bits=bits)
    packed, scales, zeros = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.T))
    found = quantize(weight, Format(bits, size, symmetric, "rtn", "float32"))
    np.testing.assert_array_equal(found.values, packed)
    np.testing.assert_array_equal(found.scales, scales)
    if not symmetric:
        np.testing.assert_array_equal(found.zeros, zeros)


FORMATS = st.builds(
    Format,
    st.sampled_from([4, 8]),
    SIZES,
    st.booleans(),
    st.sampled_from(["rtn", "mse"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), SHAPES, FORMATS)
def test_every_value_is_the_nearest_of_those_that_its_block_has(seed: int, shape: tuple[int, int], how: Format) -> None:
    weight = weights(seed, shape[0], shape[1] * how.size)
    found = quantize(weight, how)
    values, zeros = numbers(found, how)
    scales = found.scales.astype(np.float64)[..., None]
    all_of_them = (np.arange(1 << how.bits) - zeros[..., None].astype(int)) * scales  # (N, blocks, 2^bits)
    exact = weight.reshape(values.shape).astype(np.float64)
    nearest = np.abs(exact[..., None] - all_of_them[:, :, None]).min(-1)
    chosen = np.abs(exact - (values.astype(int) - zeros[..., None].astype(int)) * scales)
    # A place, up to 255, has three roundings to float32: off by 5e-5 of a scale at most, and so twice that beyond the nearest.
    assert (chosen <= nearest + 1e-4 * np.abs(scales)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), SHAPES, SIZES, st.booleans())
def test_scales_by_error_are_never_farther_than_those_by_range(
    seed: int, shape: tuple[int, int], size: int, symmetric: bool
) -> None:
    weight = weights(seed, shape[0], shape[1] * size)
    distances = []
    for algorithm in ("rtn", "mse"):
        how = Format(4, size, symmetric, algorithm, "float32")  # type: ignore[arg-type]
        off = dequantized(quantize(weight, how), how) - weight
        distances.append((off.reshape(-1, size) ** 2).sum(1))
    assert (distances[1] <= distances[0] * (1 + 1e-5) + 1e-12).all()


def test_scales_by_error_are_nearer_for_weights_like_those_of_networks() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    far = {}
    for algorithm in ("rtn", "mse"):
        how = Format(4, 32, False, algorithm, "float32")  # type: ignore[arg-type]
        far[algorithm] = np.linalg.norm(dequantized(quantize(weight, how), how) - weight) / np.linalg.norm(weight)
    assert far["mse"] < 0.97 * far["rtn"] < 0.081


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), SHAPES, FORMATS)
def test_torch_comes_to_the_same_bits(seed: int, shape: tuple[int, int], how: Format) -> None:
    """What verification compares with: code of its own."""
    weight = weights(seed, shape[0], shape[1] * how.size)
    before = torch.get_num_threads()
    with one_thread() as threads:
        assert (threads, torch.get_num_threads()) == (before, 1)
        again = blocks_again(weight, how, threads)
    assert torch.get_num_threads() == before
    for part, values in quantize(weight, how)._asdict().items():
        np.testing.assert_array_equal(again[part], values.view(f"u{values.itemsize}"), part)


def test_a_weight_of_many_chunks_and_another_memory_order_is_the_same() -> None:
    how = Format(4, 32, False, "mse", "float16")
    weight = weights(1, 5000, 512)  # several threads
    whole = quantize(np.asfortranarray(weight), how)
    rows = [quantize(weight[index : index + 100], how) for index in range(0, len(weight), 100)]
    for part in range(3):
        np.testing.assert_array_equal(whole[part], np.concatenate([each[part] for each in rows]))


@pytest.mark.parametrize("scale", ["float32", "float16", "bfloat16"])
def test_recipes_give_the_same_and_survive_json(scale: str) -> None:
    how = Format(4, 16, False, "mse", scale)
    weight = weights(2, 8, 96)
    of = Transpose((1, 0), Param("w", (96, 8)))
    expected, lately = quantize(weight, how), Lately()
    for part in PARTS:
        recipe = Blockwise(part, how, of)
        assert from_json(to_json(recipe)) == recipe
        found = evaluate(recipe, lambda key: weight.T, lately=lately)
        assert (found.shape, found.dtype.name) == (recipe.shape, recipe.dtype)
        np.testing.assert_array_equal(found, getattr(expected, part))


@pytest.mark.parametrize(
    "changed",
    [{"bits": 3}, {"bits": True}, {"size": 24}, {"size": 128}, {"algorithm": "hqq"}, {"scale": "float64"},
     {"symmetric": 1}, {"blockwise": "biases"}, {"size": None}],
    ids=str,
)  # fmt: skip
def test_a_recipe_that_does_not_fit_is_refused(changed: dict[str, object]) -> None:
    right = to_json(Blockwise("values", Format(4, 32, False, "mse", "float32"), Param("w", (8, 96))))
    with pytest.raises(ValueError, match="recipe"):
        from_json({**right, **changed})


def test_parts_that_several_threads_ask_for_are_made_once() -> None:
    made: list[int] = []
    lately = Lately()
    blocks = quantize(weights(0, 2, 32), Format(4, 32, True, "rtn", "float32"))

    def make() -> Blocks:
        made.append(1)
        time.sleep(0.05)
        return blocks

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(lately.get("w", make))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and all(each is blocks for each in found)
    for other in range(Lately.KEPT):
        lately.get(other, lambda: blocks)
    lately.get("w", make)
    assert len(made) == 2, "it was let go"


def test_what_fails_fails_for_all_who_wait() -> None:
    lately = Lately()

    def fail() -> Blocks:
        raise ValueError("no such weight")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such weight"):
            lately.get("w", fail)
