"""Center the input of instance norms over few values, which the WebGPU provider computes inaccurately.

Its kernels compute the variance as the mean of squares minus the squared mean, so the result is off by about
6e-8 (mean / standard deviation)². Where a group of GroupNorm has only a few values, as in the innermost blocks of a small
image, the mean can be a hundred times the deviation: the UNet of a tiny model was off by 1e-3. Subtracting the mean first
costs little there. Larger groups are left as they are: at full size, the smallest of Stable Diffusion has 2560 values.
Details: benchmarks/providers/webgpu_norms.md.
"""

from __future__ import annotations

import math
from typing import Any

from sdflow.onnx_model.nodes import refill

NORM = "InstanceNormalization"
FEW = 64
"""Number of values that are normalized together."""
AXES_AS_INPUT = 18
"""Opset from which on ReduceMean has its axes as an input."""


def with_centered_norms(model: Any) -> None:
    """Center the inputs of such norms of a ModelProto with known shapes (`specialize`), in place."""
    import numpy as np
    from onnx import helper, numpy_helper

    graph = model.graph
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    shapes = {
        item.name: [axis.dim_value for axis in item.type.tensor_type.shape.dim]
        for item in (*graph.input, *graph.value_info)
    }
    nodes = []
    for node in graph.node:
        shape = shapes.get(node.input[0], ()) if node.op_type == NORM else ()
        if len(shape) > 2 and 1 < math.prod(shape[2:]) <= FEW:
            given, name = node.input[0], f"{node.output[0]}_input"
            mean = helper.make_node("ReduceMean", [given], [f"{name}_mean"], f"{name}_mean")
            axes = list(range(2, len(shape)))
            if opset >= AXES_AS_INPUT:
                graph.initializer.append(numpy_helper.from_array(np.array(axes), f"{name}_axes"))
                mean.input.append(f"{name}_axes")
            else:
                mean.attribute.append(helper.make_attribute("axes", axes))
            nodes.append(mean)
            nodes.append(helper.make_node("Sub", [given, f"{name}_mean"], [f"{name}_centered"], f"{name}_centered"))
            node.input[0] = f"{name}_centered"
        nodes.append(node)
    refill(graph.node, nodes)
