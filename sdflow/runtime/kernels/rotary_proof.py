"""Test RotaryQkv on this device against its definition."""

from __future__ import annotations

from pathlib import Path

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.one_node import in_order, run_node
from sdflow.runtime.kernels.rotary_definitions import INPUTS, QKVS, QkvCase, qkv_expected, qkv_feeds
from sdflow.tolerances import KERNEL_LIMIT, KERNEL_LIMIT_BFLOAT16


def rotary_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Return case -> (relative L2 distance to numpy, limit)."""
    found = {}
    for case in QKVS:
        for name, distance in qkv_differences(library, case).items():
            found[f"{case.operator}, {name}, {case}"] = (distance, rounding_limit(case.bfloat16))
    return found


def rounding_limit(bfloat16: bool) -> float:
    """Return the limit of the distance for this type."""
    return KERNEL_LIMIT_BFLOAT16 if bfloat16 else KERNEL_LIMIT


def qkv_differences(library: Path, case: QkvCase) -> dict[str, float]:
    """Return query, key and value -> relative L2 distance to numpy."""
    from onnx import helper

    feeds = qkv_feeds(case)
    element = helper.np_dtype_to_tensor_dtype(next(iter(feeds.values())).dtype)
    expected = dict(zip(("q", "k", "v"), qkv_expected(feeds, case.attributes), strict=False))
    results = {name: (element, each.shape) for name, each in expected.items()}
    found = run_node(library, case.operator, feeds, results, inputs=in_order(INPUTS, feeds), attributes=case.attributes)
    return {name: relative_l2(each, expected[name]) for name, each in found.items()}
