"""One of our operators as a session of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.replace import VERSION


def one_node_session(library: Path, node: Any, feeds: dict[str, Any], results: list[Any]) -> Any:
    """One node on the CUDA provider."""
    from onnx import helper

    ort = import_onnxruntime()
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    graph = helper.make_graph([node], node.op_type, inputs, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CUDAExecutionProvider"], enable_fallback=0
    )
