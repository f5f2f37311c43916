"""NhwcConv.

Definition: ONNX Runtime, docs/ContribOperators.md: Conv on (N, H, W, C). Its text gives the weight as for Conv; the
actual layout (M, kH, kW, C/group) is from onnxruntime/python/tools/transformers/fusion_nhwc_conv.py, which makes the
operator.
"""

from __future__ import annotations

from sdflow.verify.lowering.builder import Builder, Node


def nhwc_conv(b: Builder, node: Node) -> list[str]:
    """Conv with x (N, H, W, C) and weight (M, kH, kW, C/group); gives (N, H', W', M)."""
    node.allow("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    x = b.op("Transpose", node.input(0), perm=[0, 3, 1, 2])
    weight = b.op("Transpose", node.input(1), perm=[0, 3, 1, 2])
    bias = [node.input(2)] if node.has(2) else []
    y = b.op("Conv", x, weight, *bias, **node.attributes)
    return [b.op("Transpose", y, perm=[0, 2, 3, 1])]
