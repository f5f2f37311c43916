"""GroupNorm, SkipGroupNorm, SkipLayerNormalization, SimplifiedLayerNormalization, SkipSimplifiedLayerNormalization.

Definitions: ONNX Runtime, docs/ContribOperators.md (the same text is in the wheel: `get_all_operator_schema()`). The
sum of x, skip and bias is stored with the operator's element type before it is normalized, according to
onnxruntime/contrib_ops/cuda/diffusion/group_norm_impl_kernel.cuh and cuda/bert/skip_layer_norm_impl.cu.
"""

from __future__ import annotations

import numpy as np

from sdflow.verify.lowering.builder import FLOAT, Builder, Node


def group_norm(b: Builder, node: Node) -> list[str]:
    """gamma (x - mean) / sqrt(variance + epsilon) + beta over each group of channels, then SiLU if `activation` is 1."""
    return [_group_norm(b, node, node.input(0))]


def skip_group_norm(b: Builder, node: Node) -> list[str]:
    """GroupNorm of s = x + skip + bias; s is the second output. x (N, H, W, C); skip the same, (N, 1, 1, C) or (N, C):
    with H and W as one axis, all of them have as many, also where a quantized product's are unknown."""
    last = bool(node.attribute("channels_last", 1))
    x, skip, bias = node.input(0), node.input(3), node.optional(4)
    if bias is not None:
        x = b.op("Add", x, bias if last else b.op("Unsqueeze", bias, b.ints(1, 2)))
    axes = b.ints(-1), b.op("Shape", node.raw(1))
    rows = b.op("Concat", b.ints(0), *(axes if last else reversed(axes)), axis=0)
    total = b.op("Add", b.op("Reshape", x, rows), b.op("Reshape", skip, rows))
    total = b.rounded(b.op("Reshape", total, b.op("Shape", x)), node.element_type)
    return [_group_norm(b, node, total), total]


def skip_layer_normalization(b: Builder, node: Node) -> list[str]:
    """Layer normalization of s = x + skip + bias over the last axis; s is the fourth output.

    x (N, S, C); skip the same, without N, or with N = 1.
    """
    total = _with_skip(b, node, node.optional(4))
    scale_and_shift = [node.input(2), *([node.input(3)] if node.has(3) else [])]
    y = b.op("LayerNormalization", total, *scale_and_shift, axis=-1, epsilon=node.attribute("epsilon", 1e-12))
    return [y, "", "", total]


def simplified_layer_normalization(b: Builder, node: Node) -> list[str]:
    """scale x / sqrt(mean(x^2) + epsilon) over the axes from `axis` on (RMS normalization)."""
    node.allow("axis", "epsilon", "stash_type")
    if node.has_output(1):
        raise node.error("inv_std_var is an output for training only")
    if node.attribute("axis", -1) not in (-1, b.rank(node.raw(0)) - 1):
        raise node.error("only normalization over the last axis is supported by the lowering")
    return [_root_mean_square(b, node, node.input(0), node.input(1), 1e-5)]


def skip_simplified_layer_normalization(b: Builder, node: Node) -> list[str]:
    """SimplifiedLayerNormalization of s = x + skip + bias; s is the fourth output."""
    total = _with_skip(b, node, node.optional(3))
    return [_root_mean_square(b, node, total, node.input(2), 1e-12), "", "", total]


def _with_skip(b: Builder, node: Node, bias: str | None) -> str:
    """x + skip + bias."""
    node.allow("epsilon")
    if node.has_output(1) or node.has_output(2):
        raise node.error("mean and inv_std_var are outputs for training only")
    total = node.input(0) if bias is None else b.op("Add", node.input(0), bias)
    return b.rounded(b.op("Add", total, node.input(1)), node.element_type)


def _root_mean_square(b: Builder, node: Node, x: str, scale: str, epsilon: float) -> str:
    size = b.op("Cast", b.op("Shape", scale), to=FLOAT)
    mean = b.op("Div", b.op("ReduceSum", b.op("Mul", x, x), b.ints(-1)), size)
    root = b.op("Sqrt", b.op("Add", mean, b.scalar(node.attribute("epsilon", epsilon))))
    return b.op("Mul", b.op("Div", x, root), scale)


def _group_norm(b: Builder, node: Node, x: str) -> str:
    node.allow("activation", "channels_last", "epsilon", "groups")
    last = bool(node.attribute("channels_last", 1))
    groups = int(node.required("groups"))
    activation = node.required("activation")
    if activation not in (0, 1):
        raise node.error(f"activation {activation} is not supported by the lowering")
    x = b.op("Transpose", x, perm=[0, 3, 1, 2]) if last else x
    # Instance normalization takes mean and variance over all but the first two axes: of (N, groups, the rest) here.
    ones, zeros = (b.constant(np.full(groups, value, np.float32)) for value in (1.0, 0.0))
    grouped = b.op("Reshape", x, b.ints(0, groups, -1))
    y = b.op("InstanceNormalization", grouped, ones, zeros, epsilon=node.attribute("epsilon", 1e-5))
    y = b.op("Reshape", y, b.op("Shape", x))
    gamma, beta = (b.op("Unsqueeze", node.input(index), b.ints(1, 2)) for index in (1, 2))
    y = b.op("Add", b.op("Mul", y, gamma), beta)
    if activation == 1:
        y = b.op("Mul", y, b.op("Sigmoid", y))
    return b.op("Transpose", y, perm=[0, 2, 3, 1]) if last else y
