"""Which provider took which node: told by ONNX Runtime, confirmed by a profile, and judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from sdflow.errors import VerificationError
from sdflow.runtime.sessions.placement import (
    PlacedNode,
    judge,
    placement,
    placement_by_profile,
    shape_computation,
)
from sdflow.runtime.sessions.session import create_session
from sdflow.runtime.sessions.shape_nodes import runs_on_device
from sdflow.targets import TARGETS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = tanh(reshape(x)) + w: `shape`, `first`, `target` compute shapes; `reshape`, `tanh`, `add` do the work."""
    nodes = [
        helper.make_node("Shape", ["x"], ["x_shape"], name="shape"),
        helper.make_node("Gather", ["x_shape", "zero"], ["rows"], name="first"),
        helper.make_node("Concat", ["rows", "minus_one"], ["new_shape"], name="target", axis=0),
        helper.make_node("Reshape", ["x", "new_shape"], ["flat"], name="reshape"),
        helper.make_node("Tanh", ["flat"], ["t"], name="tanh"),
        helper.make_node("Add", ["t", "w"], ["y"], name="add"),
    ]
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 10, 20])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
            helper.make_tensor("minus_one", TensorProto.INT64, [1], [-1]),
            helper.make_tensor("w", TensorProto.FLOAT, [200], [0.5] * 200),
        ],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_shape_computation_ends_where_data_begins(model: Path) -> None:
    assert shape_computation(model) == {"shape", "first", "target"}


def test_onnxruntime_and_its_profile_tell_the_same(model: Path) -> None:
    target = TARGETS["cpu"]
    told = placement(create_session(model, target), model)
    profiled = placement_by_profile(model, target, {"x": np.ones((3, 10, 20), np.float32)})
    assert told.nodes == profiled.nodes == {"CPUExecutionProvider": 6}
    assert told.fallen == profiled.fallen == ()
    told.require_complete("test")


def test_work_that_fell_to_the_cpu_is_a_failure_and_shapes_there_are_not(model: Path) -> None:
    placed = [
        PlacedNode("shape", "Shape", "", "CPUExecutionProvider"),
        PlacedNode("target", "Concat", "", "CPUExecutionProvider"),
        PlacedNode("tanh", "Tanh", "", "CPUExecutionProvider"),
        PlacedNode("norm", "GroupNorm", "com.microsoft", "CUDAExecutionProvider"),
        PlacedNode("add", "Add", "", "CUDAExecutionProvider"),
    ]
    found = judge(placed, "CUDAExecutionProvider", shape_computation(model))
    assert found.nodes == {"CPUExecutionProvider": 3, "CUDAExecutionProvider": 2}
    assert found.shapes_on_cpu == 2
    assert [node.name for node in found.fallen] == ["tanh"]
    with pytest.raises(VerificationError) as raised:
        found.require_complete("unet")
    assert "unet: 1 of 5 nodes do not run on CUDAExecutionProvider" in str(raised.value)
    assert "tanh (Tanh) on CPUExecutionProvider" in str(raised.value)


def test_only_the_first_of_many_nodes_are_named(model: Path) -> None:
    placed = [PlacedNode(f"n{i}", "Conv", "", "CPUExecutionProvider") for i in range(20)]
    with pytest.raises(VerificationError, match="and 17 more"):
        judge(placed, "DmlExecutionProvider", shape_computation(model)).require_complete("vae", name_at_most=3)


def test_shapes_on_another_accelerator_are_held_against_the_target(model: Path) -> None:
    placed = [PlacedNode("shape", "Shape", "", "CUDAExecutionProvider")]
    assert judge(placed, "TensorrtExecutionProvider", shape_computation(model)).fallen == tuple(placed)


@pytest.mark.parametrize(("op_type", "waits_for_nothing"), [("Shape", True), ("Relu", False)])
def test_nodes_on_the_cpu_are_seen_unless_they_compute_shapes(op_type: str, waits_for_nothing: bool) -> None:
    """A CUDA session with such a node must wait for the device before it reads the node's inputs."""
    element = TensorProto.INT64 if op_type == "Shape" else TensorProto.FLOAT
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    found = helper.make_tensor_value_info("y", element, None)
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], "node")], "g", [given], [found])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert runs_on_device(session, model) is waits_for_nothing
