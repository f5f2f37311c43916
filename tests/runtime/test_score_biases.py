"""Which values of a step are no more than what is added to attention's scores, and that a step of zeros is the same without."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.score_biases import score_biases, without_biases
from sdflow.runtime.denoiser.split import Parts

TOKENS, WIDTH = 6, 8


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> Any:
    names = [name if name != "-" else "" for name in inputs.split()]
    domain = "com.microsoft" if op_type == "MultiHeadAttention" else ""
    return helper.make_node(op_type, names, [output], output, domain=domain, **attributes)


ATTENDED = [
    node("MultiHeadAttention", "sample sample sample - - bias", "attended", num_heads=2),
    node("Transpose", "attended", "turned", perm=[0, 2, 1]),
    node("MatMul", "attended turned", "products"),
    node("Unsqueeze", "products axis", "scores"),
    node("Add", "scores bias", "hidden"),
    node("Softmax", "hidden", "weights", axis=-1),
]
"""With a bias both ways: in the operator, and added before a softmax."""


def parts(*more: Any, result: str = "weights") -> Parts:
    """A step that reads `bias`, which the text part gives."""
    row, square = [1, TOKENS, WIDTH], [1, 1, TOKENS, TOKENS]
    given = [("sample", row), ("bias", square)]
    inner = {"attended": row, "turned": [1, WIDTH, TOKENS], "products": [1, TOKENS, TOKENS], "scores": square}
    inner |= {"hidden": square, "weights": square, "other": square}
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(
        [*ATTENDED, *more],
        "step",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in given],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, square)],
        [axis],
        value_info=[
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in inner.items()
            if name != result
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    step = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return Parts(onnx.ModelProto(), onnx.ModelProto(), step, ("bias",), (), 1, 1, Moving("sample", "timestep"))


def run(step: Any, **feeds: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, feeds)[0]
    return result


def test_a_step_is_the_same_without_zeros_and_reads_them_no_more() -> None:
    whole = parts()
    assert score_biases(whole) == ("bias",)
    free = without_biases(whole, ["bias"])
    onnx.checker.check_model(free.step)
    assert [item.name for item in free.step.graph.input] == ["sample"]
    assert [(each.op_type, len(each.input)) for each in free.step.graph.node][:1] == [("MultiHeadAttention", 3)]
    assert len(free.step.graph.node) == len(ATTENDED) - 1
    assert free.text_values == ()
    assert len(whole.step.graph.node) == len(ATTENDED), "the step with the bias was changed"
    random = np.random.default_rng(0)
    sample = random.normal(size=(1, TOKENS, WIDTH)).astype(np.float32)
    bias = np.zeros((1, 1, TOKENS, TOKENS), np.float32)
    assert np.allclose(run(whole.step, sample=sample, bias=bias), run(free.step, sample=sample), rtol=1e-5, atol=0)
    bias[..., -1] = -30000
    assert run(whole.step, sample=sample, bias=bias)[..., -1].max() == 0


@pytest.mark.parametrize(
    ("more", "result"),
    [
        ([node("Mul", "weights bias", "other")], "other"),  # read by something else
        ([node("Add", "weights bias", "other")], "other"),  # added to no scores
        ([], "bias"),
        ([node("Relu", "hidden", "other")], "other"),  # the sum is read by something else
    ],
)
def test_what_is_read_otherwise_too_stays(more: list[Any], result: str) -> None:
    assert score_biases(parts(*more, result=result)) == ()
