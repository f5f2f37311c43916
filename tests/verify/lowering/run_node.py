"""Models of one node, run as they are or lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sdflow.verify.lowering import lower, session_of
from sdflow.verify.lowering.lower import DOMAINS

CONTRIB = "com.microsoft"


def model_of(op_type: str, inputs: dict[str, np.ndarray | None], outputs: list[str], **attributes: Any) -> Any:
    """One contrib node; every input is a graph input, "" where it is None."""
    names = [name if value is not None else "" for name, value in inputs.items()]
    node = helper.make_node(op_type, names, outputs, "the_node", domain=DOMAINS.get(op_type, CONTRIB), **attributes)
    given = {name: value for name, value in inputs.items() if value is not None}
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in given.items()}
    graph = helper.make_graph(
        [node],
        "one node",
        [helper.make_tensor_value_info(name, types[name], value.shape) for name, value in given.items()],
        [helper.make_tensor_value_info(name, next(iter(types.values())), None) for name in outputs if name],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run_lowered(op_type: str, inputs: dict[str, np.ndarray | None], outputs: list[str], **attributes: Any) -> list[Any]:
    """What the lowered node computes."""
    lowered = lower(model_of(op_type, inputs, outputs, **attributes))
    assert lowered.operators == {op_type: 1}
    assert {node.domain for node in lowered.model.graph.node} == {""}
    given = {name: value for name, value in inputs.items() if value is not None}
    return list(session_of(lowered, Path(), threads=1).run(None, given))


def run_kernel(op_type: str, inputs: dict[str, np.ndarray | None], outputs: list[str], **attributes: Any) -> list[Any]:
    """What ONNX Runtime's own CPU kernel computes."""
    import onnxruntime

    model = model_of(op_type, inputs, outputs, **attributes)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {name: value for name, value in inputs.items() if value is not None}))


def close(actual: np.ndarray, expected: np.ndarray, roundings: float = 2) -> None:
    """float32 to 1e-5 of the largest value; float16 to `roundings` half units in the last place of each value."""
    assert actual.shape == expected.shape
    expected = expected.astype(np.float64)
    if actual.dtype == np.float16:
        unit = np.abs(np.spacing(expected.astype(np.float16))).astype(np.float64)
        allowed = roundings * unit / 2 + 2e-5 * np.abs(expected).max()
    else:
        assert actual.dtype == np.float32
        allowed = np.full(expected.shape, 1e-5 * max(1.0, np.abs(expected).max()))
    assert np.all(np.abs(actual.astype(np.float64) - expected) <= allowed)


def initializer(name: str, values: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(values, name)
