"""Our operators for transformers on the device at hand against their definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.distance import relative_l2
from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.replace import VERSION
from sdflow.runtime.kernels.transformer_definitions import (
    ACTIVATION_INPUTS,
    ACTIVATIONS,
    RESIDUAL_INPUTS,
    RESIDUALS,
    ActivationCase,
    ResidualCase,
    activation_expected,
    activation_feeds,
    residual_expected,
    residual_feeds,
)
from sdflow.tolerances import KERNEL_LIMIT, KERNEL_LIMIT_BFLOAT16

if TYPE_CHECKING:
    import numpy as np


def all_residual_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Operator, result and case -> relative L2 distance to numpy's, and what it may be."""
    return {
        f"{case.operator}, {name}, {case}": (distance, _limit(case))
        for case in RESIDUALS
        for name, distance in residual_differences(library, case).items()
    }


def all_activation_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Operator and case -> relative L2 distance to numpy's, and what it may be."""
    return {f"{case.operator}, {case}": (activation_difference(library, case), _limit(case)) for case in ACTIVATIONS}


def _limit(case: ResidualCase | ActivationCase) -> float:
    return KERNEL_LIMIT_BFLOAT16 if case.bfloat16 else KERNEL_LIMIT


def residual_differences(library: Path, case: ResidualCase) -> dict[str, float]:
    """Result -> relative L2 distance to numpy's."""
    feeds = residual_feeds(case)
    expected = residual_expected(case, feeds.values)
    found = _computed(library, case, RESIDUAL_INPUTS, feeds.inputs, expected)
    return {name: relative_l2(found[name], value) for name, value in expected.items()}


def activation_difference(library: Path, case: ActivationCase) -> float:
    """Relative L2 distance to numpy's."""
    feeds = activation_feeds(case)
    expected = activation_expected(case, feeds)
    return relative_l2(_computed(library, case, ACTIVATION_INPUTS, feeds, {"y": expected})["y"], expected)


def _computed(
    library: Path,
    case: ResidualCase | ActivationCase,
    names: Sequence[str],
    feeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """What the operator computes on the CUDA provider. Casts are around it, since numpy has no bfloat16."""
    import numpy as np
    from onnx import TensorProto, helper

    element = TensorProto.BFLOAT16 if case.bfloat16 else TensorProto.FLOAT16
    inputs = [name if name in feeds else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    nodes = [helper.make_node("Cast", [f"{name}/float"], [name], f"{name}/cast", to=element) for name in feeds]
    nodes.append(helper.make_node(case.operator, inputs, list(expected), "ours", domain=DOMAIN, **case.attributes))
    nodes += [
        helper.make_node("Cast", [name], [f"{name}/float"], f"{name}/cast", to=TensorProto.FLOAT) for name in expected
    ]
    graph = helper.make_graph(
        nodes,
        case.operator,
        [
            helper.make_tensor_value_info(f"{name}/float", TensorProto.FLOAT, value.shape)
            for name, value in feeds.items()
        ],
        [
            helper.make_tensor_value_info(f"{name}/float", TensorProto.FLOAT, value.shape)
            for name, value in expected.items()
        ],
        value_info=[helper.make_tensor_value_info(name, element, value.shape) for name, value in expected.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    session = _session(library, helper.make_model(graph, opset_imports=opsets, ir_version=8))
    results = session.run(
        [f"{name}/float" for name in expected],
        {f"{name}/float": value.astype(np.float32) for name, value in feeds.items()},
    )
    return dict(zip(expected, results, strict=True))


def _session(library: Path, model: Any) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CUDAExecutionProvider"], enable_fallback=0
    )
