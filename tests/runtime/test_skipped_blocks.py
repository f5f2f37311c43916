"""Blocks are left out of a graph only where it shows where they begin and end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from sdflow.errors import UsageError
from sdflow.runtime.denoiser.skipped_blocks import without_blocks


def graph_of(*, fused: bool) -> Any:
    """Two blocks, each of which adds twice itself to what comes in. fused: the second begins with a SkipLayerNormalization, which
    takes in the first one's sum."""
    nodes = [
        helper.make_node("Abs", ["x"], ["tokens"]),
        helper.make_node("Mul", ["tokens", "two"], ["/blocks.0/ff/Mul_output_0"]),
        helper.make_node("Add", ["tokens", "/blocks.0/ff/Mul_output_0"], ["/blocks.0/Add_output_0"]),
    ]
    read = "/blocks.0/Add_output_0"
    if fused:
        outputs = ["/blocks.1/norm/output_0", "", "", "/blocks.1/sum"]
        nodes[-1] = helper.make_node(
            "SkipLayerNormalization", ["tokens", "/blocks.0/ff/Mul_output_0", "two"], outputs, domain="com.microsoft"
        )
        read = "/blocks.1/sum"
    nodes += [
        helper.make_node("Mul", [read, "two"], ["/blocks.1/ff/Mul_output_0"]),
        helper.make_node("Add", [read, "/blocks.1/ff/Mul_output_0"], ["/blocks.1/Add_output_0"]),
        helper.make_node("Identity", ["/blocks.1/Add_output_0"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    two = helper.make_tensor("two", TensorProto.FLOAT, [4], [2.0] * 4)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "blocks", values[:1], values[1:], [two]), opset_imports=opsets)


def test_what_comes_into_a_block_goes_on() -> None:
    x = np.arange(4, dtype=np.float32)
    (whole,) = ReferenceEvaluator(graph_of(fused=False)).run(None, {"x": x})
    np.testing.assert_array_equal(whole, 9 * x)
    for layers, factor in (((0,), 3), ((1,), 3), ((0, 1), 1)):
        cut = without_blocks(graph_of(fused=False), "blocks", layers, "skip_guidance_layers")
        np.testing.assert_array_equal(ReferenceEvaluator(cut).run(None, {"x": x})[0], factor * x)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_block_whose_sum_is_fused_with_a_norm_is_refused(layer: int) -> None:
    with pytest.raises(UsageError, match=f"inputs and outputs of denoiser block {layer} cannot be found"):
        without_blocks(graph_of(fused=True), "blocks", (layer,), "skip_guidance_layers")
