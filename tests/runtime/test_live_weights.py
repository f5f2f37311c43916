"""Weights that are inputs of a graph: what is written between two runs is what the next one reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from sdflow.runtime.sessions.live_weights import LiveWeights, over_single_pixels

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((6, 1, 1, 4)).astype(np.float32)
IMAGE = RANDOM.standard_normal((2, 3, 5, 4)).astype(np.float32)
BIAS = RANDOM.standard_normal(6).astype(np.float32)


def conv(**attributes: Any) -> Any:
    return helper.make_node("NhwcConv", ["x", "w", "b"], ["y"], "conv", domain="com.microsoft", **attributes)


def graph_of(node: Any, bias: bool) -> onnx.ModelProto:
    if not bias:
        del node.input[2:]
    tensors = [numpy_helper.from_array(WEIGHT, "w"), *([numpy_helper.from_array(BIAS, "b")] if bias else [])]
    values = [helper.make_tensor_value_info(*each) for each in (("x", 1, [2, 3, 5, 4]), ("y", 1, [2, 3, 5, 6]))]
    graph = helper.make_graph([node], "one", values[:1], values[1:], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(session: onnxruntime.InferenceSession, slots: dict[str, torch.Tensor]) -> np.ndarray:
    binding = session.io_binding()
    binding.bind_cpu_input("x", IMAGE)
    for name, slot in slots.items():
        binding.bind_input(name, "cpu", 0, np.float32, list(slot.shape), slot.data_ptr())
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    result: np.ndarray = binding.copy_outputs_to_cpu()[0]
    return result


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_over_single_pixels_is_a_product_and_reads_what_is_written(bias: bool) -> None:
    live = LiveWeights({"w": torch.from_numpy(WEIGHT)})
    opened, slots = live.open(graph_of(conv(kernel_shape=[1, 1]), bias))
    assert [value.name for value in opened.graph.input] == ["x", "w"]
    session = onnxruntime.InferenceSession(opened.SerializeToString(), providers=["CPUExecutionProvider"])
    other = torch.from_numpy(RANDOM.standard_normal(WEIGHT.shape).astype(np.float32))
    for values, expected in (({}, WEIGHT), ({"w": other}, other.numpy()), ({}, WEIGHT)):
        live.hold(values)
        wanted = np.einsum("nhwc,mc->nhwm", IMAGE, expected[:, 0, 0]) + (BIAS if bias else 0)
        np.testing.assert_allclose(run(session, slots), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "is_one"),
    [
        ({"kernel_shape": [1, 1]}, True),
        ({"kernel_shape": [1, 1], "strides": [1, 1], "dilations": [1, 1], "pads": [0] * 4, "group": 1}, True),
        ({"kernel_shape": [3, 3], "pads": [1] * 4}, False),
        ({"kernel_shape": [1, 1], "strides": [2, 2]}, False),
        ({"kernel_shape": [1, 1], "pads": [1, 0, 0, 0]}, False),
        ({"kernel_shape": [1, 1], "group": 2}, False),
        ({"kernel_shape": [1, 1], "auto_pad": "SAME_UPPER"}, False),
    ],
)
def test_which_convolutions_are_products(attributes: dict[str, Any], is_one: bool) -> None:
    assert over_single_pixels(conv(**attributes)) is is_one


def test_what_others_read_of_the_graph_stays() -> None:
    live = LiveWeights({"w": torch.from_numpy(WEIGHT)})
    graph = graph_of(conv(kernel_shape=[1, 1]), True)
    before = graph.SerializeToString()
    live.open(graph)
    assert graph.SerializeToString() == before
    assert graph.graph.initializer[0].data_type == TensorProto.FLOAT
