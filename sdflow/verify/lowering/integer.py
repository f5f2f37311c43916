"""MatMulIntegerToFloat of com.microsoft and Int8MatMul of sdflow, in float32.

Int8MatMul: `sdflow.onnx_model.int8`. MatMulIntegerToFloat: ONNX Runtime, docs/ContribOperators.md, and
onnxruntime/contrib_ops/cpu/quantization/dynamic_quantize_matmul.cc: y is the product of a minus its zero point and b,
times both scales, plus the bias. Integers are multiplied as float32, which no processor saturates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdflow.verify.lowering.builder import FLOAT, Builder, Node


def matmul_integer_to_float(b: Builder, node: Node) -> list[str]:
    """a (..., K), b (K, N), scales of a, scales of b (N), zero of a, and the bias (N)."""
    node.allow()
    node.refuse_inputs({5: "b's zero point"})
    a = b.op("Cast", node.raw(0), to=FLOAT)
    if node.has(4):
        a = b.op("Sub", a, b.op("Cast", node.raw(4), to=FLOAT))
    product = b.op("MatMul", a, b.op("Cast", node.raw(1), to=FLOAT))
    product = b.op("Mul", b.op("Mul", product, node.input(2)), node.input(3))
    bias = node.optional(6)
    return [product if bias is None else b.op("Add", product, bias)]


def int8_matmul(b: Builder, node: Node) -> list[str]:
    """x (..., K), each row rounded to whole multiples of its own scale, times the weight (N, K), times the scales, plus
    the bias."""
    node.allow("rotation")
    x = node.input(0)
    if rotation := node.attribute("rotation", 0):
        turn: NDArray[np.float32] = np.ones((1, 1), np.float32)
        while len(turn) < rotation:
            turn = np.kron(turn, np.array([[1, 1], [1, -1]], np.float32))
        groups = b.op("Reshape", x, b.ints(-1, rotation))
        groups = b.op("Div", b.op("MatMul", groups, b.constant(turn)), b.scalar(rotation**0.5))
        x = b.op("Reshape", groups, b.op("Shape", x))
    size = b.op("Abs", x)
    largest = b.op("GatherElements", size, b.op("ArgMax", size, axis=-1, keepdims=1), axis=-1)
    scale = b.op("Div", largest, b.scalar(127))
    is_nothing = b.op("Less", scale, b.scalar(2.0**-126))
    scale = b.op("Where", is_nothing, b.scalar(1), scale)
    up = b.op("Where", is_nothing, b.scalar(1), b.op("Div", b.scalar(127), largest))
    rows = b.op("Round", b.op("Mul", x, up))
    weight = b.op("Transpose", b.op("Cast", node.raw(1), to=FLOAT), perm=[1, 0])
    product = b.op("Mul", b.op("Mul", b.op("MatMul", rows, weight), scale), node.input(2))
    bias = node.optional(3)
    return [product if bias is None else b.op("Add", product, bias)]
