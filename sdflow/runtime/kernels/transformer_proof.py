"""Test the transformer operators on this device against their definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.runtime.kernels.float8_proof import results_apart
from sdflow.runtime.kernels.hopper import has_float8
from sdflow.runtime.kernels.one_node import in_order, run_node
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
    """Return operator, result and case -> (relative L2 distance to numpy, limit)."""
    return {
        f"{case.operator}, {name}, {case}": (distance, _limit(case))
        for case in (*RESIDUALS, *(FLOAT8_RESIDUALS if has_float8() else ()))
        for name, distance in residual_differences(library, case).items()
    }


def all_activation_differences(library: Path) -> dict[str, tuple[float, float]]:
    """Return operator and case -> (relative L2 distance to numpy, limit)."""
    cases = (*ACTIVATIONS, *(FLOAT8_ACTIVATIONS if has_float8() else ()))
    return {
        f"{case.operator}, {case}": (activation_difference(library, case), activation_limit(case)) for case in cases
    }


def activation_limit(case: ActivationCase) -> float:
    """Return the limit of `activation_difference`."""
    return FLOAT8_ACTIVATION_LIMIT if case.float8 else _limit(case)


def _limit(case: ResidualCase | ActivationCase) -> float:
    return KERNEL_LIMIT_BFLOAT16 if case.bfloat16 else KERNEL_LIMIT


def residual_differences(library: Path, case: ResidualCase) -> dict[str, float]:
    """Return result -> relative L2 distance to numpy."""
    feeds = residual_feeds(case)
    expected = residual_expected(case, feeds.values)
    found = _computed(library, case, RESIDUAL_INPUTS, feeds.inputs, expected)
    return results_apart(found, expected, bfloat16=case.bfloat16)


def activation_difference(library: Path, case: ActivationCase) -> float:
    """Return the relative L2 distance to numpy."""
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
    """Run the operator on the CUDA provider and return its outputs."""
    from onnx import TensorProto

    element = TensorProto.BFLOAT16 if case.bfloat16 else TensorProto.FLOAT16
    results: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, value in expected.items():
        if f"{name}{SCALES}" in case.outputs:
            results |= {name: (TensorProto.UINT8, value.shape)}
            results |= {f"{name}{SCALES}": (TensorProto.FLOAT, (math.prod(value.shape[:-1]),))}
        else:
            results[name] = element, value.shape
    inputs = in_order(names, feeds)
    return run_node(
        library, case.operator, feeds, results, inputs=inputs, outputs=case.outputs, attributes=case.attributes
    )
