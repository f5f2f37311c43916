"""sdflow's Float8MatMul in float32, as defined in sdflow.onnx_model.float8.

E4M3 is decoded by a table and rounded to by arithmetic, for any opset: ONNX casts to it only from version 19 on.
"""

from __future__ import annotations

import numpy as np

from sdflow.verify.lowering.builder import Builder, Node

INT32 = 6
LARGEST, SMALLEST_NORMAL = 448.0, 2.0**-6


def float8_matmul(b: Builder, node: Node) -> list[str]:
    """x (..., K), each row rounded to E4M3 with its own scale, times the weight (N, K), times the scales."""
    node.allow()
    x = node.input(0)
    size = b.op("Abs", x)
    largest = b.op("GatherElements", size, b.op("ArgMax", size, axis=-1, keepdims=1), axis=-1)
    is_zero = b.op("Equal", largest, b.scalar(0))
    up = b.op("Where", is_zero, b.scalar(1), b.op("Div", b.scalar(LARGEST), largest))
    scale = b.op("Where", is_zero, b.scalar(1), b.op("Div", largest, b.scalar(LARGEST)))
    weight = b.op("Gather", b.constant(_table()), b.op("Cast", node.raw(1), to=INT32))
    weight = b.op("Mul", weight, b.op("Unsqueeze", node.input(2), b.ints(1)))
    product = b.op("MatMul", _rounded(b, b.op("Mul", x, up)), b.op("Transpose", weight, perm=[1, 0]))
    return [b.op("Mul", product, scale)]


def _rounded(b: Builder, x: str) -> str:
    """The nearest number of E4M3; x is at most 448.

    Numbers from 2^-6 on keep four bits: x times 2^20 + 1, less the difference of that and x (T. J. Dekker, A
    floating-point technique for extending the available precision, 1971). Smaller ones become multiples of 2^-9, as
    float32 sums at 2^14 do.
    """
    wide = b.op("Mul", x, b.scalar(2.0**20 + 1))
    normal = b.op("Sub", wide, b.op("Sub", wide, x))
    far = b.scalar(1.5 * 2**14)
    small = b.op("Sub", b.op("Add", x, far), far)
    return b.op("Where", b.op("Less", b.op("Abs", x), b.scalar(SMALLEST_NORMAL)), small, normal)


def _table() -> object:
    """The values of the 256 bytes."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    size[byte & 127 == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)
