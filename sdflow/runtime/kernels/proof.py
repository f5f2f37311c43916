"""Test the operators on this device against their definitions (`sdflow.runtime.kernels.definitions`)."""

from __future__ import annotations

from pathlib import Path

from sdflow.distance import relative_l2
from sdflow.errors import TargetUnavailableError
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
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
from sdflow.runtime.kernels.float8_proof import float8_differences
from sdflow.runtime.kernels.int8_proof import int8_differences
from sdflow.runtime.kernels.one_node import in_order, result_of, run_node
from sdflow.runtime.kernels.parts import FLOAT8, FOLDER, INT8
from sdflow.runtime.kernels.rotary_proof import rotary_differences
from sdflow.runtime.kernels.transformer_proof import all_activation_differences, all_residual_differences
from sdflow.tolerances import (
    FLOAT8_PRODUCT_LIMIT,
    FLOAT8_ROWS_LIMIT,
    INT8_ROTATED_LIMIT,
    INT8_ROUNDINGS,
    KERNEL_LIMIT,
    KERNEL_LIMIT_BFLOAT16,
)


def prove(library: Path, part: str) -> dict[str, float]:
    """Return case -> relative L2 distance to numpy, for all cases of a part.

    Raises TargetUnavailableError if a result is wrong or missing.
    """
    onnxruntime = import_onnxruntime()
    try:
        limited = _differences(library, part)
    except onnxruntime_errors(onnxruntime) as error:
        raise TargetUnavailableError(f"sdflow's kernels do not run on this device: {error}") from error
    for name, (distance, limit) in limited.items():
        if not distance <= limit:
            raise TargetUnavailableError(f"sdflow's kernels are wrong on this device: {name} by {distance:.1e}")
    return {name: distance for name, (distance, _) in limited.items()}


def _differences(library: Path, part: str) -> dict[str, tuple[float, float]]:
    """Return case -> (relative L2 distance to numpy, limit)."""
    if part == "rotary_qkv":
        return rotary_differences(library)
    if part == "residual_norm":
        return all_residual_differences(library)
    if part == "gated_activation":
        return all_activation_differences(library)
    if part == FLOAT8:
        return float8_differences(library)
    if part == INT8:
        return int8_differences(library)
    if part == "group_norm":
        found = {f"GroupNorm, {name}, {case}": d for case in CASES for name, d in differences(library, case).items()}
    elif part == "bias_split_gelu":
        found = {f"BiasSplitGelu, {shape}": gelu_difference(library, shape) for shape in GELU_SHAPES}
    elif part == "interleave":
        found = {f"{INTERLEAVE}, {case}": interleave_difference(library, *case) for case in INTERLEAVED}
    elif part == "geglu":
        found = {f"Geglu, {shape}": geglu_difference(library, shape) for shape in GEGLU_SHAPES}
    elif part == "few_keys_attention":
        found = {f"FewKeysAttention, {case}": attention_difference(library, case) for case in ATTENTIONS}
    else:
        raise KeyError(part)
    return {name: (distance, KERNEL_LIMIT) for name, distance in found.items()}


def sources() -> list[str]:
    """Return the testing code, which is part of the key of test results."""
    names = ["proof", "one_node", "definitions", "float8_proof", "rotary_proof", "rotary_definitions"]
    names += ["transformer_proof", "transformer_definitions", "int8_proof"]
    texts = [(FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in names]
    limits = (
        KERNEL_LIMIT,
        KERNEL_LIMIT_BFLOAT16,
        FLOAT8_ROWS_LIMIT,
        FLOAT8_PRODUCT_LIMIT,
        INT8_ROTATED_LIMIT,
        INT8_ROUNDINGS,
    )
    return [*texts, f"{limits}"]


def gelu_difference(library: Path, shape: tuple[int, ...]) -> float:
    """Return the relative L2 distance of BiasSplitGelu to numpy."""
    feeds = gelu_feeds(shape)
    expected = gelu_expected(feeds)
    return relative_l2(result_of(library, "BiasSplitGelu", feeds, expected.shape), expected)


def interleave_difference(library: Path, shape: tuple[int, int, int, int], single: bool) -> float:
    """Return the relative L2 distance of InterleavePhases to numpy, which must be 0."""
    from onnx import helper

    x = phases(shape, single)
    expected, element = interleave_expected(x), helper.np_dtype_to_tensor_dtype(x.dtype)
    operator = f"{INTERLEAVE}Single" if single else INTERLEAVE
    return relative_l2(result_of(library, operator, {"x": x}, expected.shape, element), expected)


def geglu_difference(library: Path, shape: tuple[int, ...]) -> float:
    """Return the relative L2 distance of Geglu to numpy. shape: of x, and the result's width."""
    feeds = geglu_feeds(shape)
    expected = geglu_expected(feeds)
    return relative_l2(result_of(library, "Geglu", feeds, expected.shape), expected)


def attention_difference(library: Path, case: AttentionCase) -> float:
    """Return the relative L2 distance of FewKeysAttention to numpy."""
    feeds = attention_feeds(case)
    expected = attention_expected(feeds, case)
    attributes = {"num_heads": case.heads, "scale": attention_scale(case)}
    return relative_l2(result_of(library, "FewKeysAttention", feeds, expected.shape, attributes=attributes), expected)


def differences(library: Path, case: GroupNormCase) -> dict[str, float]:
    """Return output -> relative L2 distance to numpy."""
    from onnx import helper

    feeds = group_norm_feeds(case)
    element = helper.np_dtype_to_tensor_dtype(feeds["x"].dtype)
    results = dict.fromkeys(("y", "sum") if case.kept else ("y",), (element, case.shape))
    outputs = ("y", "sums", "sum") if case.kept else ("y", "sums")
    attributes = {"groups": case.groups, "epsilon": EPSILON, "activation": int(case.silu)}
    inputs = in_order(INPUTS, feeds)
    found = run_node(library, case.operator, feeds, results, inputs=inputs, outputs=outputs, attributes=attributes)
    expected = group_norm_expected(feeds, case)
    return {name: relative_l2(found[name], expected[name]) for name in results}
