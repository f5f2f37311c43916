"""MatMulIntegerToFloat of com.microsoft, in float32.

Definition: ONNX Runtime, docs/ContribOperators.md, and
onnxruntime/contrib_ops/cpu/quantization/dynamic_quantize_matmul.cc: y is the product of a minus its zero point and b,
times both scales, plus the bias. Integers are multiplied as float32, which no processor saturates.
"""

from __future__ import annotations

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
