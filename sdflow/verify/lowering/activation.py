"""Gelu, BiasGelu, FastGelu, QuickGelu, BiasSplitGelu, BiasAdd.

Definitions: ONNX Runtime, docs/ContribOperators.md (the same text is in the wheel: `get_all_operator_schema()`), and
for details that it omits onnxruntime/contrib_ops/cuda/diffusion/bias_split_gelu_impl.cu (the left half multiplies the
Gelu of the right half, Gelu with the error function).
"""

from __future__ import annotations

import math

from sdflow.verify.lowering.builder import Builder, Node


def gelu(b: Builder, node: Node) -> list[str]:
    """0.5 x (1 + erf(x / sqrt(2)))."""
    node.allow()
    return [_gelu(b, node.input(0))]


def bias_gelu(b: Builder, node: Node) -> list[str]:
    """Gelu(a + b), b along the last axis."""
    node.allow()
    return [_gelu(b, b.op("Add", node.input(0), node.input(1)))]


def fast_gelu(b: Builder, node: Node) -> list[str]:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), of x + bias if there is one."""
    node.allow()
    bias = node.optional(1)
    x = node.input(0) if bias is None else b.op("Add", node.input(0), bias)
    cube = b.op("Mul", b.op("Mul", x, x), b.op("Mul", x, b.scalar(0.044715)))
    inner = b.op("Mul", b.op("Add", x, cube), b.scalar(math.sqrt(2 / math.pi)))
    return [b.op("Mul", b.op("Mul", x, b.scalar(0.5)), b.op("Add", b.op("Tanh", inner), b.scalar(1)))]


def quick_gelu(b: Builder, node: Node) -> list[str]:
    """x sigmoid(alpha x)."""
    node.allow("alpha")
    x = node.input(0)
    return [b.op("Mul", x, b.op("Sigmoid", b.op("Mul", x, b.scalar(node.attribute("alpha", 1.702)))))]


def bias_split_gelu(b: Builder, node: Node) -> list[str]:
    """(x + bias) split in half along the last axis: left times Gelu(right). (N, S, D) becomes (N, S, D/2)."""
    node.allow()
    x = b.op("Add", node.input(0), node.input(1))
    size = b.op("Shape", node.raw(1))
    half = b.op("Div", size, b.ints(2))
    axis = b.ints(-1)
    left = b.op("Slice", x, b.ints(0), half, axis)
    right = b.op("Slice", x, half, size, axis)
    return [b.op("Mul", left, _gelu(b, right))]


def bias_add(b: Builder, node: Node) -> list[str]:
    """x + bias + skip; x and skip (N, S, C), bias (C)."""
    node.allow()
    return [b.op("Add", b.op("Add", node.input(0), node.input(1)), node.input(2))]


def _gelu(b: Builder, x: str) -> str:
    erf = b.op("Erf", b.op("Mul", x, b.scalar(math.sqrt(0.5))))
    return b.op("Mul", b.op("Mul", x, b.scalar(0.5)), b.op("Add", erf, b.scalar(1)))
