"""Ranges of activations: of every value, over steps, with NaN and infinity told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sdflow.verify.artifact.overflow import NodeRange, overflow, ranges
from sdflow.verify.reference.cases import Case, Cases


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """square = x * x; gone = square - square; y = gone + x; in float16; with its weightless graph in a file."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], "multiply"),
        helper.make_node("Sub", ["square", "square"], ["gone"], "subtract"),
        helper.make_node("Add", ["gone", "x"], ["y"], "add"),
        helper.make_node("Shape", ["y"], ["shape"], "shape"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n"]) for name in "xy"]
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [1])
    graph = helper.make_graph(nodes, "g", ends[:1], [ends[1], shape])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def steps(*rows: list[float]) -> list[dict[str, Any]]:
    return [{"x": np.array(row, np.float16)} for row in rows]


def test_the_largest_magnitude_of_each_value_and_its_step(model: Path) -> None:
    assert ranges(model, steps([1, -3], [2, -4, 1], [0])) == [
        NodeRange("multiply", "Mul", "square", 16.0, 1, None),
        NodeRange("subtract", "Sub", "gone", 0.0, 0, None),
        NodeRange("add", "Add", "y", 4.0, 1, None),
    ]


def test_the_size_of_an_overflow_shows_and_hides_nothing_behind_it(model: Path) -> None:
    square, gone, _ = ranges(model, steps([1, 300]))
    assert square.largest == 90000.0
    assert square.exceeds(1.0)
    assert not gone.exceeds(0.0)


def test_values_near_the_largest_exceed_a_fraction(model: Path) -> None:
    square, *_ = ranges(model, steps([200]))
    assert square.largest == 40000.0
    assert square.exceeds(0.5)
    assert not square.exceeds(0.7)


def test_a_nan_is_an_error_that_names_its_step_whatever_the_magnitudes(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Sqrt", ["x"], ["y"], "root")], "g", ends[:1], ends[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    cases = Cases()
    for step, value in enumerate((4.0, -1.0)):
        cases.add(Case(f"step {step + 1}", "trajectory", step), {"x": np.array([value], np.float32)})
    found = overflow("unet", tmp_path, cases)
    assert [(each.level, each.node) for each in found.findings] == [("error", "root")]
    assert "Sqrt gives NaN at step 2" in found.findings[0].what
    assert list(found.suspects) == ["root"]


def test_a_mask_may_go_past_the_lower_end_and_a_score_not_past_the_upper(tmp_path: Path) -> None:
    """CLIP's mask without fusion: scores minus 65504, read by Softmax alone."""
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["scores"], "add"),
        helper.make_node("Softmax", ["scores"], ["y"], "softmax", axis=-1),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["n"]) for name in "xy"]
    mask = onnx.numpy_helper.from_array(np.array([0, -65504], np.float16), "mask")
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [mask])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    scores, _ = ranges(path, steps([3, -40]))
    assert (scores.largest, scores.exceeds(0.5)) == (3.0, False)
    scores, _ = ranges(path, steps([65504, 3], [3, 0]))
    assert scores.exceeds(0.9)
    graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT16, ["n"]))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    scores, _ = ranges(path, steps([3, -40]))
    assert scores.exceeds(1.0), "somebody else reads it"
