"""Compare norms of ONNX Runtime's WebGPU provider with NumPy in float64, by the ratio of mean and standard deviation.

    python benchmarks/providers/webgpu_norms.py

Needs onnxruntime-ep-webgpu and an adapter; docs/targets.md says how to get SwiftShader's. Prints a line per ratio;
findings are in webgpu_norms.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from onnx import TensorProto, helper

from sdflow.distance import relative_l2
from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.machine.plugins import plugins_of
from sdflow.targets import TARGETS, WEBGPU_PROVIDER

RATIOS = (0, 1, 3, 10, 30, 100)
EPSILON = 1e-5
SIZE = 64
NORMS = {
    "InstanceNormalization": ("", 2, {}),
    "LayerNormalization": ("", 2, {"axis": -1}),
    "SkipLayerNormalization": ("com.microsoft", 3, {}),
}
"""Operator -> its domain, its inputs beside the value (skip, scale, bias) and attributes."""


def computed(operator: str, value: np.ndarray) -> Any:
    domain, count, attributes = NORMS[operator]
    ones, zeros = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
    given = [value, *([np.zeros_like(value)] if count == 3 else []), ones, zeros]
    infos = [helper.make_tensor_value_info(f"x{at}", TensorProto.FLOAT, each.shape) for at, each in enumerate(given)]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, value.shape)
    node = helper.make_node(
        operator, [each.name for each in infos], ["y"], domain=domain, epsilon=EPSILON, **attributes
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, [result]), opset_imports=opsets, ir_version=8)
    target = TARGETS["webgpu"]
    ort = import_onnxruntime(target)
    options = ort.SessionOptions()
    options.add_provider_for_devices(plugins_of(ort, target).devices[WEBGPU_PROVIDER][:1], {})
    session = ort.InferenceSession(model.SerializeToString(), options, enable_fallback=0)
    (found,) = session.run(None, {f"x{at}": each for at, each in enumerate(given)})
    return found


def main() -> None:
    noise = np.random.default_rng(0).standard_normal((1, SIZE, SIZE)).astype(np.float32)
    for ratio in RATIOS:
        value = noise + np.float32(ratio)
        exact = value.astype(np.float64)
        centered = exact - exact.mean(-1, keepdims=True)
        expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)
        found = ", ".join(f"{each} {relative_l2(computed(each, value), expected):.1e}" for each in NORMS)
        print(f"mean / standard deviation {ratio}: {found}", flush=True)


if __name__ == "__main__":
    main()
