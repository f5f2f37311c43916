"""One of our operators as a session of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.replace import VERSION

FLOAT = "/float"
"""What the name of a bfloat16 value ends in where it is float32."""


def widened(feeds: dict[str, Any]) -> dict[str, Any]:
    """Feeds with those in bfloat16 as float32, under the names that `one_node_session` has for them."""
    import ml_dtypes
    import numpy as np

    brain = np.dtype(ml_dtypes.bfloat16)
    return {
        f"{name}{FLOAT}" if value.dtype == brain else name: value.astype(np.float32) if value.dtype == brain else value
        for name, value in feeds.items()
    }


def one_node_session(library: Path, node: Any, feeds: dict[str, Any], results: list[Any]) -> Any:
    """One node on the CUDA provider. feeds: in bfloat16, which ONNX Runtime does not take from numpy, they are `widened` when it
    runs; a result in bfloat16 is float32 under its name with FLOAT behind it."""
    from onnx import TensorProto, helper

    ort = import_onnxruntime()
    wide = widened(feeds)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in wide.items()
    ]
    narrowed = [
        helper.make_node("Cast", [f"{name}{FLOAT}"], [name], to=TensorProto.BFLOAT16)
        for name in feeds
        if name not in wide
    ]
    halves = [item for item in results if item.type.tensor_type.elem_type == TensorProto.BFLOAT16]
    casts = [helper.make_node("Cast", [item.name], [f"{item.name}{FLOAT}"], to=TensorProto.FLOAT) for item in halves]
    results = [
        item
        if item not in halves
        else helper.make_tensor_value_info(
            f"{item.name}{FLOAT}", TensorProto.FLOAT, [axis.dim_value for axis in item.type.tensor_type.shape.dim]
        )
        for item in results
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    graph = helper.make_graph([*narrowed, node, *casts], node.op_type, inputs, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CUDAExecutionProvider"], enable_fallback=0
    )
