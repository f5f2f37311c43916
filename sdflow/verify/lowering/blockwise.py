"""MatMulNBits of com.microsoft, in float32.

Definition: ONNX Runtime, docs/ContribOperators.md: y = x w^T, w (N, K) = (number - zero) scale for each block along K;
numbers and zeros are packed into bytes, low bits first; without zeros, 2^(bits - 1).
"""

from __future__ import annotations

import numpy as np

from sdflow.verify.lowering.builder import Builder, Node

INT32 = 6


def matmul_nbits(b: Builder, node: Node) -> list[str]:
    """x (..., K), values (N, blocks, bytes), scales (N, blocks), zeros (N, bytes): bits of 4 or 8."""
    node.allow("K", "N", "bits", "block_size", "accuracy_level")
    node.refuse_inputs({4: "g_idx", 5: "bias"})
    rows, columns, size = node.required("N"), node.required("K"), node.required("block_size")
    bits = node.attribute("bits", 4)
    if bits not in (4, 8):
        raise node.error(f"{bits} bits are not supported by the lowering")
    blocks = -(-columns // size)
    numbers = b.op("Reshape", _numbers(b, node.raw(1), bits), b.ints(rows, blocks, size))
    if node.has(3):
        per_row = -(-blocks * bits // 8) * 8 // bits
        zeros = b.op("Reshape", _numbers(b, node.raw(3), bits), b.ints(rows, per_row))
        zeros = b.op("Slice", zeros, b.ints(0), b.ints(blocks), b.ints(1))
        numbers = b.op("Sub", numbers, b.op("Reshape", zeros, b.ints(rows, blocks, 1)))
    else:
        numbers = b.op("Sub", numbers, b.scalar(1 << (bits - 1)))
    scales = b.op("Reshape", node.input(2), b.ints(rows, blocks, 1))
    weight = b.op("Reshape", b.op("Mul", numbers, scales), b.ints(rows, blocks * size))
    if columns != blocks * size:
        weight = b.op("Slice", weight, b.ints(0), b.ints(columns), b.ints(1))
    return [b.op("MatMul", node.input(0), b.op("Transpose", weight, perm=[1, 0]))]


def _numbers(b: Builder, packed: str, bits: int) -> str:
    """Unpack bytes to float32 numbers; those of one byte go along a new last axis."""
    byte = np.arange(256, dtype=np.float32)
    if bits == 8:
        return b.op("Cast", packed, to=1)
    table = np.stack([byte % 16, byte // 16], 1)
    return b.op("Gather", b.constant(table), b.op("Cast", packed, to=INT32))
