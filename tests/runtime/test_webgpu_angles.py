"""Sines and cosines for WebGPU: products and sums that give what numpy gives in float64, for all angles that models have."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.runtime.sessions.specialize import specialize
from sdflow.runtime.sessions.webgpu_angles import with_right_angles

ANGLES = np.concatenate([np.linspace(-5000, 5000, 20_001), np.linspace(-7, 7, 20_001)]).reshape(2, -1)
KNOWN = {"Sin": np.sin, "Cos": np.cos}


def model(operators: list[str], kind: int) -> Any:
    """Nodes of one value, which something else computes too."""
    given, *results = (helper.make_tensor_value_info(name, kind, ["a", "b"]) for name in ("x", *operators))
    nodes = [helper.make_node("Neg", ["x"], ["less"]), helper.make_node("Neg", ["less"], ["angle"])]
    nodes += [helper.make_node(each, ["angle"], [each], each) for each in operators]
    graph = helper.make_graph(nodes, "g", [given], results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("operators", [["Sin"], ["Cos"], ["Cos", "Sin"]], ids="-".join)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("known", [True, False], ids=["static", "dynamic"])
def test_they_are_right_to_their_types_precision(operators: list[str], dtype: type, known: bool) -> None:
    given = ANGLES.astype(dtype)
    made = model(operators, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
    if known:
        made = specialize(made, dict(zip("ab", given.shape, strict=True)))
    with_right_angles(made)
    onnx.checker.check_model(made, full_check=True)
    assert not KNOWN.keys() & {node.op_type for node in made.graph.node}
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for name, found in zip(operators, session.run(None, {"x": given}), strict=True):
        assert found.dtype == dtype
        expected = KNOWN[name](given.astype(np.float64))
        assert np.abs(found - expected).max() < (1e-6 if dtype is np.float32 else 5e-4)


def test_a_graph_without_angles_stays_as_it_is() -> None:
    made = model([], TensorProto.FLOAT)
    before = made.SerializeToString()
    with_right_angles(made)
    assert made.SerializeToString() == before
