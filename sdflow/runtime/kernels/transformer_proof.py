"""Our operators for transformers on the device at hand against their definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.machine.onnx_runtime import import_onnxruntime
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.float8_proof import results_apart
from sdflow.runtime.kernels.hopper import has_float8
from sdflow.runtime.kernels.replace import VERSION
from sdflow.runtime.kernels.transformer_definitions import (
    ACTIVATION_INPUTS,
    ACTIVATIONS,
    FLOAT8_ACTIVATIONS,
    FLOAT8_RESIDUALS,
    RESIDUAL_INPUTS,
    RESIDUALS,
    SCALES,
    ActivationCase,
    ResidualCase,
    activation_expected,
    activation_feeds,
    residual_expected,
    residual_feeds,
)
from sdflow.tolerances import FLOAT8_ACTIVATION_LIMIT, KERNEL_LIMIT, KERNEL_LIMIT_BFLOAT16

if TYPE_CHECKING:
    import numpy as np


def all_residual_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Operator, result and case -> relative L2 distance to numpy's, and what it may be."""
    return {
        f"{case.operator}, {name}, {case}": (distance, _limit(case))
        for case in (*RESIDUALS, *(FLOAT8_RESIDUALS if has_float8() else ()))
        for name, distance in residual_differences(library, case).items()
    }


def all_activation_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Operator and case -> relative L2 distance to numpy's, and what it may be."""
    cases = (*ACTIVATIONS, *(FLOAT8_ACTIVATIONS if has_float8() else ()))
    return {
        f"{case.operator}, {case}": (activation_difference(library, case), activation_limit(case)) for case in cases
    }


def activation_limit(case: ActivationCase) -> float:
    """What `activation_difference` may be."""
    return FLOAT8_ACTIVATION_LIMIT if case.float8 else _limit(case)


def _limit(case: ResidualCase | ActivationCase) -> float:
    return KERNEL_LIMIT_BFLOAT16 if case.bfloat16 else KERNEL_LIMIT


def residual_differences(library: Path, case: ResidualCase) -> dict[str, float]:
    """Result -> relative L2 distance to numpy's."""
    feeds = residual_feeds(case)
    expected = residual_expected(case, feeds.values)
    found = _computed(library, case, RESIDUAL_INPUTS, feeds.inputs, expected)
    return results_apart(found, expected, bfloat16=case.bfloat16)


def activation_difference(library: Path, case: ActivationCase) -> float:
    """Relative L2 distance to numpy's."""
    feeds = activation_feeds(case)
    expected = activation_expected(case, feeds)
    found = _computed(library, case, ACTIVATION_INPUTS, feeds, {"y": expected})
    return results_apart(found, {"y": expected}, bfloat16=case.bfloat16)["y"]


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
    nodes.append(helper.make_node(case.operator, inputs, list(case.outputs), "ours", domain=DOMAIN, **case.attributes))
    rows = {name for name in case.outputs if f"{name}{SCALES}" in case.outputs}
    plain = {name: value.shape for name, value in expected.items() if name not in rows}
    nodes += [
        helper.make_node("Cast", [name], [f"{name}/float"], f"{name}/cast", to=TensorProto.FLOAT) for name in plain
    ]
    results = {f"{name}/float": (TensorProto.FLOAT, shape) for name, shape in plain.items()}
    for name in rows:
        shape = expected[name].shape
        results |= {name: (TensorProto.UINT8, shape), f"{name}{SCALES}": (TensorProto.FLOAT, (math.prod(shape[:-1]),))}
    graph = helper.make_graph(
        nodes,
        case.operator,
        [
            helper.make_tensor_value_info(f"{name}/float", TensorProto.FLOAT, value.shape)
            for name, value in feeds.items()
        ],
        [helper.make_tensor_value_info(name, *given) for name, given in results.items()],
        value_info=[helper.make_tensor_value_info(name, element, shape) for name, shape in plain.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    session = _session(library, helper.make_model(graph, opset_imports=opsets, ir_version=8))
    found = session.run(list(results), {f"{name}/float": value.astype(np.float32) for name, value in feeds.items()})
    return {name.removesuffix("/float"): value for name, value in zip(results, found, strict=True)}


def _session(library: Path, model: Any) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CUDAExecutionProvider"], enable_fallback=0
    )
