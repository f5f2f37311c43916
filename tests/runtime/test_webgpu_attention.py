"""Attention of WebGPU in other operators: what ONNX Runtime's own kernels on the CPU compute of the fused ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.errors import VerificationError
from sdflow.runtime.sessions.specialize import specialize
from sdflow.runtime.sessions.webgpu_attention import without_fused_attention

HEADS, SIZE = 2, 8
WIDTH = HEADS * SIZE
SIZES = {"batch": 2, "rows": 40, "keys": 12}


def model(
    operator: str, inputs: list[str], shapes: dict[str, list[Any]], weights: dict[str, Any], **settings: Any
) -> Any:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    node = helper.make_node(operator, inputs, ["y"], "attention", domain="com.microsoft", num_heads=HEADS, **settings)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "rows", WIDTH])
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph([node], "g", infos, [result], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(made: Any, given: dict[str, np.ndarray]) -> np.ndarray:
    (found,) = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, given
    )
    return found


def same_without(made: Any) -> None:
    """The model gives what it gave when its attention is taken apart, and has none any more."""
    random = np.random.default_rng(0)
    fixed = specialize(made, {name: SIZES[name] for item in made.graph.input for name in names_of(item)})
    shapes = {item.name: [axis.dim_value for axis in item.type.tensor_type.shape.dim] for item in fixed.graph.input}
    given = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    expected = run(fixed, given)
    without_fused_attention(fixed)
    onnx.checker.check_model(fixed)
    assert not any(node.domain for node in fixed.graph.node)
    np.testing.assert_allclose(run(fixed, given), expected, atol=2e-6)


def names_of(item: Any) -> list[str]:
    return [axis.dim_param for axis in item.type.tensor_type.shape.dim if axis.dim_param]


QKV = {"q": ["batch", "rows", WIDTH], "k": ["batch", "keys", WIDTH], "v": ["batch", "keys", WIDTH]}
BIAS = {"b": np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32)}


@pytest.mark.parametrize(
    ("inputs", "weights", "settings"),
    [
        (["q", "k", "v"], {}, {}),
        (["q", "k", "v", "b"], BIAS, {}),
        (["q", "k", "v"], {}, {"scale": 0.7}),
        (["q", "k", "v", "", "", "s"], {}, {}),
    ],
    ids=["plain", "with biases", "another scale", "added to the scores"],
)
def test_multi_head_attention(inputs: list[str], weights: dict[str, Any], settings: dict[str, Any]) -> None:
    shapes: dict[str, list[Any]] = {**QKV, **({"s": [1, 1, "rows", "keys"]} if "s" in inputs else {})}
    same_without(model("MultiHeadAttention", inputs, shapes, weights, **settings))


def test_multi_head_attention_with_k_and_v_by_heads() -> None:
    by_heads = ["batch", HEADS, "keys", SIZE]
    same_without(model("MultiHeadAttention", ["q", "k", "v"], {**QKV, "k": by_heads, "v": by_heads}, {}))


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_attention_with_packed_weights(unidirectional: int) -> None:
    random = np.random.default_rng(1)
    weights = {"w": random.standard_normal((24, 3 * WIDTH)).astype(np.float32) / 5, **BIAS}
    same_without(
        model("Attention", ["x", "w", "b"], {"x": ["batch", "rows", 24]}, weights, unidirectional=unidirectional)
    )


def test_a_form_that_is_not_known_is_told_with_what_to_do() -> None:
    made = model("MultiHeadAttention", ["q"], {"q": [2, 40, HEADS, 3, SIZE]}, {})
    with pytest.raises(VerificationError, match="packed") as told:
        without_fused_attention(made)
    assert "enable_attention: false" in str(told.value.remedy)
