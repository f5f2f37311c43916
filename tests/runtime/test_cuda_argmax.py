"""Integer ArgMax becomes one that CUDA has a kernel for, with the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.runtime.sessions.cuda_argmax import with_float_argmax

TOKENS = 77


def model(element: int, cast_to: int | None) -> Any:
    """The end of a text, as transformers 5 computes it: the place of the largest id."""
    nodes = [helper.make_node("ArgMax", ["ids"], ["end"], axis=-1, keepdims=0)]
    if cast_to is not None:
        nodes = [helper.make_node("Cast", ["ids"], ["cast"], to=cast_to), *nodes]
        nodes[-1].input[0] = "cast"
    given = helper.make_tensor_value_info("ids", element, ["batch", TOKENS])
    found = helper.make_tensor_value_info("end", TensorProto.INT64, ["batch"])
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(helper.make_graph(nodes, "g", [given], [found]), opset_imports=opset, ir_version=8)


@pytest.mark.parametrize("cast_to", [None, TensorProto.INT32])
@pytest.mark.parametrize("element", [TensorProto.INT32, TensorProto.INT64])
def test_ids_are_compared_exactly_as_float32(element: int, cast_to: int | None) -> None:
    made = model(element, cast_to)
    assert with_float_argmax(made)
    onnx.checker.check_model(made, full_check=True)
    (argmax,) = (node for node in made.graph.node if node.op_type == "ArgMax")
    (before,) = (node for node in made.graph.node if node.output[0] == argmax.input[0])
    assert (before.op_type, before.attribute[0].i) == ("Cast", TensorProto.FLOAT)
    # Adjacent ids at the end of CLIP's and the largest vocabularies, ties included: the first one counts.
    ids = np.random.default_rng(0).integers(0, 262_000, (64, TOKENS)).astype(helper.tensor_dtype_to_np_dtype(element))
    ids[:32, 20], ids[:32, 40:] = 262_142, 262_143
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"ids": ids})[0], ids.argmax(-1))


def test_float_argmax_stays() -> None:
    made = model(TensorProto.FLOAT, None)
    before = made.SerializeToString(deterministic=True)
    assert not with_float_argmax(made)
    assert made.SerializeToString(deterministic=True) == before
