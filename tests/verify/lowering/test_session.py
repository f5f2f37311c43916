"""Sessions of graphs whose weights are large: the same numbers in less memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.distance import relative_l2
from sdflow.verify.lowering import lower, session, session_of

LAYERS, WIDTH = 24, 1024


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A chain of matrices in float16, 50 MB in a file of their own."""
    random = np.random.default_rng(0)
    nodes, weights = [], []
    for index in range(LAYERS):
        values = (random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float16)
        weights.append(numpy_helper.from_array(values, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [f"x{index}", f"w{index}"], [f"x{index + 1}"], f"layer {index}"))
    ends = [helper.make_tensor_value_info(f"x{at}", TensorProto.FLOAT16, [2, WIDTH]) for at in (0, LAYERS)]
    graph = helper.make_graph(nodes, "deep", ends[:1], ends[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    return tmp_path


def test_a_large_graph_computes_the_same_and_keeps_no_converted_weights(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = lower(onnx.load(str(deep / "model.onnx"), load_external_data=False))
    feed = {"x0": np.random.default_rng(1).standard_normal((2, WIDTH)).astype(np.float16)}
    (expected,) = session_of(lowered, deep, threads=1).run(None, feed)
    monkeypatch.setattr(session, "LARGE", 0)
    before = psutil.Process().memory_info().rss
    large = session_of(lowered, deep, threads=1)
    (found,) = large.run(None, feed)
    taken = psutil.Process().memory_info().rss - before
    assert relative_l2(found, expected) < 2e-3, "the same sums in another order, rounded to halves 24 times"
    assert taken < 1.5 * LAYERS * WIDTH * WIDTH * 2, "the file that is mapped, and one weight converted at a time"
