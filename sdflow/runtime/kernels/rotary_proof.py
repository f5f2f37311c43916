"""RotaryQkv on the device at hand against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdflow.distance import relative_l2
from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.replace import VERSION
from sdflow.runtime.kernels.rotary_definitions import (
    INPUTS,
    QKVS,
    QkvCase,
    qkv_expected,
    qkv_feeds,
)
from sdflow.tolerances import KERNEL_LIMIT, KERNEL_LIMIT_BFLOAT16


def rotary_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Case -> its relative L2 distance to numpy's, and what it may be."""
    found = {}
    for case in QKVS:
        for name, distance in qkv_differences(library, case).items():
            found[f"{case.operator}, {name}, {case}"] = (distance, rounding_limit(case.bfloat16))
    return found


def rounding_limit(bfloat16: bool) -> float:
    """What results in this type may be from their definition."""
    return KERNEL_LIMIT_BFLOAT16 if bfloat16 else KERNEL_LIMIT


def qkv_differences(library: Path, case: QkvCase) -> dict[str, float]:
    """Query, key and value -> relative L2 distance to numpy's."""
    from onnx import helper

    feeds = qkv_feeds(case)
    expected = qkv_expected(feeds, case.attributes)
    inputs = [name if name in feeds else "" for name in INPUTS]
    while not inputs[-1]:
        inputs.pop()
    names = ["q", "k", "v"][: len(expected)]
    node = helper.make_node(case.operator, inputs, names, domain=DOMAIN, **case.attributes)
    found = _run(library, node, feeds, dict(zip(names, [each.shape for each in expected], strict=True)))
    return {name: relative_l2(each, whole) for name, each, whole in zip(names, found, expected, strict=True)}


def _run(library: Path, node: Any, feeds: dict[str, Any], outputs: dict[str, tuple[int, ...]]) -> list[Any]:
    """A node on the CUDA provider, with casts around it: ONNX Runtime takes no bfloat16 of numpy's."""
    import numpy as np
    from onnx import TensorProto, helper

    element = helper.np_dtype_to_tensor_dtype(next(iter(feeds.values())).dtype)
    single = {f"{name}_single": value.astype(np.float32) for name, value in feeds.items()}
    nodes = [helper.make_node("Cast", [f"{name}_single"], [name], to=element) for name in feeds]
    nodes += [node, *(helper.make_node("Cast", [name], [f"{name}_single"], to=TensorProto.FLOAT) for name in outputs)]
    results = [
        helper.make_tensor_value_info(f"{name}_single", TensorProto.FLOAT, shape) for name, shape in outputs.items()
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in single.items()]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    graph = helper.make_graph(nodes, node.op_type, inputs, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CUDAExecutionProvider"], enable_fallback=0
    )
    return list(session.run([item.name for item in results], single))
