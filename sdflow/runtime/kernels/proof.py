"""Our operators on the device at hand against their definitions (`sdflow.runtime.kernels.definitions`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdflow.distance import relative_l2
from sdflow.errors import TargetUnavailableError
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.phases import INTERLEAVE
from sdflow.runtime.kernels.definitions import (
    ATTENTIONS,
    CASES,
    EPSILON,
    GEGLU_SHAPES,
    GELU_SHAPES,
    INPUTS,
    INTERLEAVED,
    AttentionCase,
    GroupNormCase,
    attention_expected,
    attention_feeds,
    attention_scale,
    geglu_expected,
    geglu_feeds,
    gelu_expected,
    gelu_feeds,
    group_norm_expected,
    group_norm_feeds,
    interleave_expected,
    phases,
)
from sdflow.runtime.kernels.replace import VERSION
from sdflow.runtime.kernels.rotary_proof import rotary_differences
from sdflow.runtime.kernels.transformer_proof import transformer_differences
from sdflow.tolerances import KERNEL_LIMIT


def prove(library: Path, *, hopper: bool = False) -> None:
    """Raises TargetUnavailableError when a result is not what it should be, or there is none. hopper: Geglu's too."""
    onnxruntime = import_onnxruntime()
    try:
        found = {f"GroupNorm, {name}, {case}": d for case in CASES for name, d in differences(library, case).items()}
        found |= {f"BiasSplitGelu, {shape}": gelu_difference(library, shape) for shape in GELU_SHAPES}
        found |= {f"{INTERLEAVE}, {case}": interleave_difference(library, *case) for case in INTERLEAVED}
        if hopper:
            found |= {f"Geglu, {shape}": geglu_difference(library, shape) for shape in GEGLU_SHAPES}
        found |= {f"FewKeysAttention, {case}": attention_difference(library, case) for case in ATTENTIONS}
        limited = {name: (distance, KERNEL_LIMIT) for name, distance in found.items()}
        limited |= transformer_differences(library) | rotary_differences(library)
    except onnxruntime_errors(onnxruntime) as error:
        raise TargetUnavailableError(f"our kernels do not run on this device: {error}") from error
    for name, (distance, limit) in limited.items():
        if not distance <= limit:
            raise TargetUnavailableError(f"our kernels are wrong on this device: {name} by {distance:.1e}")


def gelu_difference(library: Path, shape: tuple[int, ...]) -> float:
    """Relative L2 distance of BiasSplitGelu to numpy's."""
    from onnx import TensorProto, helper

    feeds = gelu_feeds(shape)
    node = helper.make_node("BiasSplitGelu", list(feeds), ["y"], domain=DOMAIN)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, (*shape[:-1], shape[-1] // 2))
    (found,) = one_node_session(library, node, feeds, [result]).run(["y"], feeds)
    return relative_l2(found, gelu_expected(feeds))


def interleave_difference(library: Path, shape: tuple[int, int, int, int], single: bool) -> float:
    """Relative L2 distance of InterleavePhases to numpy's: 0, or it is wrong."""
    from onnx import helper

    x = phases(shape, single)
    expected = interleave_expected(x)
    node = helper.make_node(f"{INTERLEAVE}Single" if single else INTERLEAVE, ["x"], ["y"], domain=DOMAIN)
    result = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(x.dtype), expected.shape)
    (found,) = one_node_session(library, node, {"x": x}, [result]).run(["y"], {"x": x})
    return relative_l2(found, expected)


def geglu_difference(library: Path, shape: tuple[int, ...]) -> float:
    """Relative L2 distance of Geglu to numpy's. shape: of x, and the result's width."""
    from onnx import TensorProto, helper

    feeds = geglu_feeds(shape)
    node = helper.make_node("Geglu", list(feeds), ["y"], domain=DOMAIN)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, (*shape[:-2], shape[-1]))
    (found,) = one_node_session(library, node, feeds, [result]).run(["y"], feeds)
    return relative_l2(found, geglu_expected(feeds))


def attention_difference(library: Path, case: AttentionCase) -> float:
    """Relative L2 distance of FewKeysAttention to numpy's."""
    from onnx import TensorProto, helper

    feeds = attention_feeds(case)
    attributes = {"num_heads": case.heads, "scale": attention_scale(case)}
    node = helper.make_node("FewKeysAttention", list(feeds), ["y"], domain=DOMAIN, **attributes)
    shape = (case.images, case.queries, case.heads * case.size)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, shape)
    (found,) = one_node_session(library, node, feeds, [result]).run(["y"], feeds)
    return relative_l2(found, attention_expected(feeds, case))


def differences(library: Path, case: GroupNormCase) -> dict[str, float]:
    """Output -> relative L2 distance to numpy's."""
    from onnx import helper

    feeds = group_norm_feeds(case)
    names = ["y", "sum"] if case.kept else ["y"]
    inputs = [name if name in feeds else "" for name in INPUTS]
    while not inputs[-1]:
        inputs.pop()
    outputs = ["y", "sums", "sum"] if case.kept else ["y", "sums"]
    node = helper.make_node(
        case.operator, inputs, outputs, domain=DOMAIN, groups=case.groups, epsilon=EPSILON, activation=int(case.silu)
    )
    results = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(feeds["x"].dtype), case.shape)
        for name in names
    ]
    session = one_node_session(library, node, feeds, results)
    found = dict(zip(names, session.run(names, feeds), strict=True))
    expected = group_norm_expected(feeds, case)
    return {name: relative_l2(found[name], expected[name]) for name in names}


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
