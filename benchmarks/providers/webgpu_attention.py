"""Compare attention of ONNX Runtime's WebGPU provider with NumPy, by shape, to find which kernels are correct on an
adapter.

    python benchmarks/providers/webgpu_attention.py

Needs onnxruntime-ep-webgpu and an adapter; docs/targets.md says how to get SwiftShader's. Prints a line per shape;
findings are in webgpu_attention.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from onnx import TensorProto, helper

from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.machine.plugins import plugins_of
from sdflow.targets import TARGETS, WEBGPU_PROVIDER

SHAPES = (
    (1, 31, 40, 2, 8),
    (1, 32, 40, 2, 8),
    (2, 16, 77, 4, 40),
    (2, 64, 64, 2, 6),
    (2, 64, 64, 2, 16),
    (2, 256, 77, 4, 64),
)
"""Batch, rows, keys, heads, head size."""


def session(inputs: dict[str, np.ndarray], heads: int) -> Any:
    target = TARGETS["webgpu"]
    ort = import_onnxruntime(target)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in inputs.items()]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, inputs["q"].shape)
    node = helper.make_node("MultiHeadAttention", list(inputs), ["y"], domain="com.microsoft", num_heads=heads)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, [result]), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.add_provider_for_devices(plugins_of(ort, target).devices[WEBGPU_PROVIDER][:1], {})
    return ort.InferenceSession(model.SerializeToString(), options, enable_fallback=0)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int) -> np.ndarray:
    def split(value: np.ndarray) -> np.ndarray:
        return value.reshape(*value.shape[:2], heads, -1).transpose(0, 2, 1, 3).astype(np.float64)

    scores = split(q) @ split(k).transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1] // heads)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ split(v)).transpose(0, 2, 1, 3).reshape(q.shape)


def main() -> None:
    random = np.random.default_rng(0)
    for batch, rows, keys, heads, size in SHAPES:
        counts = {"q": rows, "k": keys, "v": keys}
        given = {
            name: random.standard_normal((batch, count, heads * size)).astype(np.float32)
            for name, count in counts.items()
        }
        (found,) = session(given, heads).run(None, given)
        error = np.abs(found - attention(**given, heads=heads)).max()
        print(
            f"batch {batch}, {rows} rows, {keys} keys, {heads} heads of {size}: largest error {error:.1e}", flush=True
        )


if __name__ == "__main__":
    main()
