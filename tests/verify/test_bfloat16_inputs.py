"""A graph with an input in bfloat16, as the reference tokens of FLUX.2 are for CUDA, runs as a whole and in pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sdflow.verify.artifact.graph import open_graph, run_graph


@pytest.mark.parametrize("most", [None, 1 << 20])
def test_an_input_in_bfloat16_is_fed(tmp_path: Path, most: int | None) -> None:
    given = helper.make_tensor_value_info("x", TensorProto.BFLOAT16, ["a"])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a"])
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    graph = helper.make_graph([node], "g", [given], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(tmp_path / "model.onnx"))
    values = np.array([1.0, -2.5, 0.0], np.float32)
    found = run_graph(open_graph(tmp_path, "cpu", threads=1, most=most), {"x": values})
    assert (found["y"] == values).all()
