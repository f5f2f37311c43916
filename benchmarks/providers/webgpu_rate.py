"""Measure how many operations a second ONNX Runtime's WebGPU provider computes in a convolution and a matrix product.

    python benchmarks/providers/webgpu_rate.py

float32: a 3x3 convolution of 320 channels at 16x16, and a product of 512x512 matrices, inputs and outputs on the host.
Prints wall and processor time of two runs after one that compiles. Made for SwiftShader, whose rate bounds what can be
drawn there; a real GPU takes longer to be asked than to compute these.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime_ep_webgpu
from onnx import TensorProto, helper, numpy_helper

RUNS = 2


def cases() -> Iterator[tuple[str, Any, np.ndarray, float]]:
    """Name, node and weight, input (the output has its shape), and operations."""
    rng = np.random.default_rng(0)
    channels, side = 320, 16
    kernel = rng.standard_normal((channels, channels, 3, 3), dtype=np.float32)
    image = rng.standard_normal((1, channels, side, side), dtype=np.float32)
    conv = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    yield "Conv", (conv, kernel), image, 2 * kernel.size * side * side
    size = 512
    left, right = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    yield "MatMul", (helper.make_node("MatMul", ["x", "w"], ["y"]), right), left, 2 * size**3


def main() -> None:
    onnxruntime.register_execution_provider_library("webgpu", onnxruntime_ep_webgpu.get_library_path())
    devices = [each for each in onnxruntime.get_ep_devices() if each.ep_name == "WebGpuExecutionProvider"]
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(devices, {})
    for name, (node, weight), given, operations in cases():
        ends = [helper.make_tensor_value_info(each, TensorProto.FLOAT, given.shape) for each in ("x", "y")]
        graph = helper.make_graph([node], name, ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.checker.check_model(model)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        session.run(None, {"x": given})
        for _ in range(RUNS):
            wall, cpu = time.perf_counter(), time.process_time()
            session.run(None, {"x": given})
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{name}: {operations / 1e9:.2f} GFLOP in {wall:.2f} s, {cpu:.2f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
