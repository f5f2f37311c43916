"""Weights that sessions share: the values of the data file, once; a session takes them instead of the file's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sdflow.errors import VerificationError
from sdflow.runtime.sessions.device_weights import DeviceWeights
from sdflow.runtime.sessions.session import create_session
from sdflow.runtime.sessions.spans import ALIGNMENT
from sdflow.targets import TARGETS

VALUES = {
    "half": np.arange(35, dtype=np.float16).reshape(5, 7),
    "single": np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3),
    "index": np.arange(9, dtype=np.int64),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """x (2, 3) -> y = x + the single row sums, with three weights in a data file, at offsets that nothing aligns."""
    add = helper.make_node("Add", ["x", "single"], ["y"])
    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [7, 3]) for name in ("x", "y")]
    graph = helper.make_graph(
        [add], "g", [rows[0]], [rows[1]], [numpy_helper.from_array(value, name) for name, value in VALUES.items()]
    )
    path, offset = tmp_path / "model.onnx", 1
    data = bytearray(b"\0")
    for tensor in graph.initializer:
        raw = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "model.onnx.data"), ("offset", offset), ("length", len(raw))):
            tensor.external_data.add(key=key, value=str(value))
        data += raw
        offset += len(raw)
    path.with_name("model.onnx.data").write_bytes(data)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_the_values_are_those_of_the_file_and_aligned(model: Path) -> None:
    values = DeviceWeights(model, "cpu").of(onnx.load(model, load_external_data=False))
    assert values.keys() == VALUES.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value.numpy(), VALUES[name])
    starts = sorted(value.data_ptr() for value in values.values())
    assert all((start - starts[0]) % ALIGNMENT == 0 for start in starts)


def test_tensors_are_the_memory_that_sessions_read(model: Path) -> None:
    weights = DeviceWeights(model, "cpu")
    read = weights.of(onnx.load(model, load_external_data=False))
    tensors = weights.tensors(["half", "single"])
    assert {name: each.data_ptr() for name, each in tensors.items()} == {
        name: read[name].data_ptr() for name in ("half", "single")
    }
    for name, each in tensors.items():
        np.testing.assert_array_equal(each.numpy(), VALUES[name])


def test_graphs_made_of_one_model_share_the_memory(model: Path) -> None:
    weights = DeviceWeights(model, "cpu")
    graph = onnx.load(model, load_external_data=False)
    first = weights.of(graph)
    graph.graph.initializer[0].name = "another"
    second = weights.of(graph)
    assert second["another"].data_ptr() == first["half"].data_ptr()
    weights.release()
    np.testing.assert_array_equal(first["half"].numpy(), VALUES["half"])  # who was given it keeps it
    np.testing.assert_array_equal(weights.of(graph)["single"].numpy(), VALUES["single"])


def test_a_session_takes_the_values_that_it_is_given(model: Path) -> None:
    graph = onnx.load(model, load_external_data=False)
    values = DeviceWeights(model, "cpu").of(graph)
    model.with_name("model.onnx.data").write_bytes(bytes(1 + sum(value.nbytes for value in VALUES.values())))
    session = create_session(model, TARGETS["cpu"], graph=graph, weights=values)
    zeros = np.zeros((7, 3), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": zeros})[0], VALUES["single"])


def test_a_truncated_data_file_is_an_error_that_names_the_weight(model: Path) -> None:
    data = model.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(VerificationError, match="index ends at byte 227 of"):
        DeviceWeights(model, "cpu").of(onnx.load(model, load_external_data=False))
