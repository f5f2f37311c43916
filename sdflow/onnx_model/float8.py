"""The operator of sdflow that a graph with products in float8 has.

    sdflow.Float8MatMul (1)
        x (..., K) float16 or bfloat16, weight (N, K) float8_e4m3fn, scales (N) float32  ->  y (..., N), of x's type

x is quantized as it comes, each row with a scale: its largest magnitude over 448, or 1 for a row of zeros. The quotients are
rounded to E4M3 (4 bits of exponent, 3 of fraction, the largest value 448) to nearest, halves to even. y is the product of
both, times the scales of its row and its column. K and N are multiples of 16, K at most 20480.
https://arxiv.org/abs/2209.05433 for E4M3.
"""

from __future__ import annotations

from typing import Any

DOMAIN = "sdflow"
FLOAT8_MATMUL = "Float8MatMul"
UNIT, WIDEST = 16, 20480
"""Of K and N; and the largest K."""


def reads_float8(node: Any) -> bool:
    """Whether a NodeProto is a Float8MatMul."""
    return bool(node.domain == DOMAIN and node.op_type == FLOAT8_MATMUL)


def has_float8(model: Any) -> bool:
    """Whether a ModelProto has products in float8."""
    return any(reads_float8(node) for node in model.graph.node)
