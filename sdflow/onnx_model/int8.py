"""sdflow's operator for int8 products with a scale per row.

    sdflow.Int8MatMul (1)
        x (..., K) float16 or bfloat16, weight (N, K) int8, scales (N) float32, bias (N) of x's type or none
            ->  y (..., N), of x's type
        attribute: rotation, int: 16, 32, 64, 128 or 256; 0 (default): none

x is quantized at run time, in float32. With a rotation, each group of that many channels is first multiplied by the
Hadamard matrix (`sdflow.weights.hadamard`); the weight has been, too. A row's scale is its largest magnitude over 127,
or 1 where that is below float32's normal numbers. The row's values times 127 over the largest magnitude (or times 1) are
rounded to whole numbers, to nearest, ties to even. y is the product of both in int32, which is exact, times the scales
of row and column, plus the bias. K is a multiple of 16, at most 20480, and N one of 8.
"""

from __future__ import annotations

from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.nodes import attribute

INT8_MATMUL = "Int8MatMul"
UNIT_IN, UNIT_OUT, WIDEST = 16, 8, 20480
"""K is a multiple of UNIT_IN and at most WIDEST; N is a multiple of UNIT_OUT."""


def reads_int8(node: Any) -> bool:
    """Whether a NodeProto is an Int8MatMul."""
    return bool(node.domain == DOMAIN and node.op_type == INT8_MATMUL)


def has_int8(model: Any) -> bool:
    """Whether a ModelProto has int8 products with a scale per row."""
    return any(reads_int8(node) for node in model.graph.node)


def rotation_of(node: Any) -> int:
    """Return an Int8MatMul's rotation, 0 for none."""
    return int(attribute(node, "rotation", 0))
