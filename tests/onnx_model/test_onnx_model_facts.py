"""graph_facts: what is counted, and that weights are not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sdflow.onnx_model.facts import graph_facts
from sdflow.onnx_model.files import store_proto


def test_counts_nodes_of_subgraphs_types_of_weights_and_bytes(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["h"], ["b"])], "branch", [], [helper.make_tensor_value_info("b", 1, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["h"], ["c"])], "other", [], [helper.make_tensor_value_info("c", 1, None)]
    )
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("BiasAdd", ["h", "v", "h"], ["g"], domain="com.microsoft"),
            helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=other),
        ],
        "main",
        [helper.make_tensor_value_info("x", 1, ["n", 64]), helper.make_tensor_value_info("yes", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", 1, None)],
        [
            numpy_helper.from_array(np.ones((64, 64), np.float32), "w"),
            numpy_helper.from_array(np.ones(64, np.float16), "v"),
        ],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("", 17)]
    )
    store_proto(model, tmp_path, tmp_path)
    facts = graph_facts(tmp_path / "model.onnx")
    assert facts["nodes"] == 5
    assert facts["operators"] == {"BiasAdd": 1, "If": 1, "MatMul": 1, "Neg": 1, "Relu": 1}
    assert facts["dtypes"] == {"float16": {"count": 1, "bytes": 128}, "float32": {"count": 1, "bytes": 16384}}
    assert facts["opset"] == 17
    assert facts["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir()) > 16384


def test_external_data_is_sized_and_not_read(tmp_path: Path) -> None:
    weights = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[1 << 20, 1 << 15], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", "model.onnx.data"), ("offset", "0"), ("length", str(1 << 37))):
        weights.external_data.add(key=key, value=value)
    graph = helper.make_graph([], "empty", [], [], [weights])
    onnx.save(helper.make_model(graph), str(tmp_path / "model.onnx"))
    with (tmp_path / "model.onnx.data").open("wb") as stream:
        stream.truncate(1 << 37)  # 128 GiB of nothing: only a size
    facts = graph_facts(tmp_path / "model.onnx")
    assert facts["dtypes"] == {"float32": {"count": 1, "bytes": 1 << 37}}
    assert facts["bytes"] > 1 << 37
