"""The lowered operators against the kernels that ONNX Runtime's CPU provider has, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.verify.lowering.run_node import close, run_kernel, run_lowered


def values(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


def agree(op_type: str, inputs: dict[str, np.ndarray | None], outputs: list[str], **attributes: Any) -> None:
    lowered = run_lowered(op_type, inputs, outputs, **attributes)
    kernel = run_kernel(op_type, inputs, outputs, **attributes)
    for ours, theirs in zip(lowered, kernel, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(
    ("op_type", "bias"), [("Gelu", False), ("BiasGelu", True), ("FastGelu", True), ("FastGelu", False)]
)
def test_gelus(op_type: str, bias: bool) -> None:
    x, b = values((3, 7, 40), (40,))
    agree(op_type, {"x": x} | ({"b": b} if bias else {}), ["y"])


@pytest.mark.parametrize("alpha", [1.702, 1.0])
def test_quick_gelu(alpha: float) -> None:
    (x,) = values((3, 7, 40))
    agree("QuickGelu", {"x": x}, ["y"], alpha=alpha)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("skip_shape", [(3, 7, 40), (1, 7, 40), (7, 40)])
def test_skip_layer_normalization(skip_shape: tuple[int, ...], bias: bool) -> None:
    x, skip, gamma, beta, b = values((3, 7, 40), skip_shape, (40,), (40,), (40,))
    inputs = {"x": x, "skip": skip, "gamma": gamma, "beta": beta, "bias": b if bias else None}
    agree("SkipLayerNormalization", inputs, ["y", "", "", "sum"], epsilon=1e-5)


def test_simplified_layer_normalization() -> None:
    x, scale = values((3, 7, 40), (40,))
    agree("SimplifiedLayerNormalization", {"x": x, "scale": scale}, ["y"], epsilon=1e-6, axis=-1, stash_type=1)


@pytest.mark.parametrize("bias", [False, True])
def test_skip_simplified_layer_normalization(bias: bool) -> None:
    x, skip, gamma, b = values((3, 7, 40), (3, 7, 40), (40,), (40,))
    inputs = {"x": x, "skip": skip, "gamma": gamma, "bias": b if bias else None}
    agree("SkipSimplifiedLayerNormalization", inputs, ["y", "", "", "sum"], epsilon=1e-6)


KEPT = np.array([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]], np.int32)
MASKS = {
    "none": None,
    "ends": np.array([7, 3, 1], np.int32),
    "ends and starts": np.array([7, 3, 6, 0, 1, 5], np.int32),
    "keys": KEPT,
    "scores": np.stack([np.roll(KEPT, i, axis=1) for i in range(7)], axis=1),
}


@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("form", MASKS)
def test_attention(form: str, unidirectional: int) -> None:
    x, weights, bias, added = values((3, 7, 16), (16, 24 + 24 + 12), (60,), (1, 3, 7, 7))
    attributes = {"num_heads": 3, "qkv_hidden_sizes": [24, 24, 12], "unidirectional": unidirectional}
    inputs = {"x": x, "w": weights, "b": bias, "mask": MASKS[form]}
    agree("Attention", inputs, ["y"], **attributes)
    agree("Attention", inputs, ["y"], **attributes, scale=0.2, mask_filter_value=-3.0)
    agree("Attention", inputs | {"past": None, "added": added}, ["y"], **attributes)


@pytest.mark.parametrize("form", ["none", "ends", "keys", "scores"])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention(form: str, bias: bool) -> None:
    mask = MASKS[form]
    q, k, v, b, added = values((3, 7, 24), (3, 7, 24), (3, 7, 12), (60,), (3, 1, 7, 7))
    inputs = {"q": q, "k": k, "v": v, "bias": b if bias else None, "mask": mask}
    agree("MultiHeadAttention", inputs, ["y"], num_heads=3)
    agree("MultiHeadAttention", inputs | {"added": added}, ["y"], num_heads=3, scale=0.2)


def test_multi_head_attention_with_keys_by_head() -> None:
    q, k, v = values((3, 7, 24), (3, 3, 5, 8), (3, 3, 5, 8))
    agree("MultiHeadAttention", {"q": q, "k": k, "v": v}, ["y"], num_heads=3)
