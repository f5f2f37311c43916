"""Norms over few values for WebGPU: centered first, they are right where the provider's own formula is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import swiftshader
from onnx import TensorProto, helper

from sdflow.runtime.sessions.session import create_session
from sdflow.runtime.sessions.specialize import specialize
from sdflow.runtime.sessions.webgpu_norms import FEW, with_centered_norms
from sdflow.targets import TARGETS

MISSING = swiftshader.missing()
EPSILON = 1e-5


def model(opset: int = 17) -> Any:
    """GroupNorm's inner norm, of groups of any size."""
    given, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4, "size"]) for name in "xy")
    weights = [
        helper.make_tensor(name, TensorProto.FLOAT, [4], [value] * 4) for name, value in (("s", 1.0), ("b", 0.0))
    ]
    nodes = [
        helper.make_node("Identity", ["x"], ["value"]),
        helper.make_node("InstanceNormalization", ["value", "s", "b"], ["y"], epsilon=EPSILON),
    ]
    graph = helper.make_graph(nodes, "g", [given], [result], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def values(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Values whose mean is a hundred times their deviation, and their norm."""
    given = (np.random.default_rng(0).standard_normal((2, 4, size)) + 100).astype(np.float32)
    exact = given.astype(np.float64)
    centered = exact - exact.mean(-1, keepdims=True)
    return given, centered / np.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("size", [2, FEW, FEW + 1])
def test_few_values_are_centered_and_many_are_not(size: int, opset: int) -> None:
    made = specialize(model(opset), {"batch": 2, "size": size})
    with_centered_norms(made)
    onnx.checker.check_model(made, full_check=True)
    assert ("Sub" in {node.op_type for node in made.graph.node}) == (size <= FEW)
    given, expected = values(size)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": given})[0], expected, atol=1e-4)


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_a_norm_over_two_values_is_right_on_webgpu(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    given, expected = values(2)
    with swiftshader.swiftshader():
        session = create_session(path, TARGETS["webgpu"], shapes={"x": given.shape})
        (found,) = session.run(None, {"x": given})
    np.testing.assert_allclose(found, expected, atol=1e-4)
