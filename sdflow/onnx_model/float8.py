"""sdflow's operator for float8 products.

    sdflow.Float8MatMul (1)
        x (..., K) float16 or bfloat16, weight (N, K) float8_e4m3fn, scales (N) float32  ->  y (..., N), of x's type

x is quantized at run time, with a scale per row: its largest magnitude over 448, or 1 for a row of zeros. The quotients
are rounded to E4M3 (4 exponent bits, 3 fraction bits, maximum 448), to nearest, ties to even. y is the product of both,
times the scales of row and column. K and N are multiples of 16, K at most 20480. E4M3:
https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from typing import Any

DOMAIN = "sdflow"
FLOAT8_MATMUL = "Float8MatMul"
UNIT, WIDEST = 16, 20480
"""K and N are multiples of UNIT; WIDEST is the maximum K."""


def reads_float8(node: Any) -> bool:
    """Whether a NodeProto is a Float8MatMul."""
    return bool(node.domain == DOMAIN and node.op_type == FLOAT8_MATMUL)


def has_float8(model: Any) -> bool:
    """Whether a ModelProto has float8 products."""
    return any(reads_float8(node) for node in model.graph.node)
