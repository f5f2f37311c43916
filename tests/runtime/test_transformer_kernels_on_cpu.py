"""Our kernels for transformers run on the CPU, as test_kernels_on_cpu.py runs the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import Gpu, run
from sampled import sampled

from sdflow.distance import relative_l2
from sdflow.runtime.kernels.float8_proof import results_apart
from sdflow.runtime.kernels.transformer_definitions import (
    ACTIVATION_INPUTS,
    LAYER_NORM,
    NO_NORM,
    RESIDUAL_INPUTS,
    RMS_NORM,
    SCALES,
    ActivationCase,
    ResidualCase,
    activation_expected,
    activation_feeds,
    residual_expected,
    residual_feeds,
)
from sdflow.runtime.kernels.transformer_proof import activation_limit
from sdflow.tolerances import FLOAT8_ROWS_LIMIT, KERNEL_LIMIT, KERNEL_LIMIT_BFLOAT16

FOUR = Gpu(4)


def check(content: bytes, expected: np.ndarray, bfloat16: bool) -> None:
    """In L2 as on the GPU, and no element far off: NaN where nothing was written."""
    found = np.frombuffer(content, ml_dtypes.bfloat16 if bfloat16 else np.float16).reshape(expected.shape)
    found = found.astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.02)
    assert relative_l2(found, expected) <= (KERNEL_LIMIT_BFLOAT16 if bfloat16 else KERNEL_LIMIT)


def check_all(case: ResidualCase | ActivationCase, outputs: list[bytes], expected: dict[str, np.ndarray]) -> None:
    """Each result; rows of float8 by their definition, with their scales."""
    given = dict(zip(case.outputs, outputs, strict=True))
    for name, value in expected.items():
        if f"{name}{SCALES}" not in given:
            check(given[name], value, case.bfloat16)
            continue
        found = {name: np.frombuffer(given[name], np.uint8).reshape(value.shape)}
        found[f"{name}{SCALES}"] = np.frombuffer(given[f"{name}{SCALES}"], np.float32)
        (apart,) = results_apart(found, {name: value}, bfloat16=case.bfloat16).values()
        limit = activation_limit(case) if isinstance(case, ActivationCase) else FLOAT8_ROWS_LIMIT
        assert apart < limit, "Mismatched elements"


def residual(program: Path, folder: Path, case: ResidualCase, gpu: Gpu = FOUR) -> str:
    """Runs and checks it. Returns what was launched."""
    feeds = residual_feeds(case)
    inputs = [feeds.inputs.get(name) for name in RESIDUAL_INPUTS]
    (launch,), outputs = run(program, folder, gpu, case.operator, inputs, len(case.outputs), case.attributes)
    check_all(case, outputs, residual_expected(case, feeds.values))
    return launch.removesuffix(" 1")


def activation(program: Path, folder: Path, case: ActivationCase, processors: int = 4) -> str:
    """Runs and checks it. Returns what was launched."""
    feeds = activation_feeds(case)
    inputs = [feeds.get(name) for name in ACTIVATION_INPUTS]
    count = len(case.outputs)
    (launch,), outputs = run(program, folder, Gpu(processors), case.operator, inputs, count, case.attributes)
    check_all(case, outputs, {"y": activation_expected(case, feeds)})
    return launch.removesuffix(" 1")


ALL = "branch branch_bias gate branch2 branch2_bias gate2 gamma beta scale shift scale2 shift2"
DUAL = ResidualCase((2, 2, 1536), ALL, plus_one=3, parts=True)
NORMED = ResidualCase((1, 3, 3840), "branch branch_gamma gate gamma scale", RMS_NORM, bfloat16=True)
SHORT = ResidualCase((2, 3, 520), "branch branch_bias gate scale shift", plus_one=1)
MODULATED = ResidualCase((2, 2, 1536), "scale shift scale2 shift2", kept=False, plus_one=2, parts=True)


@pytest.mark.parametrize(
    ("launch", "case"),
    [
        ("residual_norm_half (2, 2, 1) (32, 2, 1)", DUAL),
        ("residual_norm_bfloat16 (2, 2, 1) (32, 2, 1)", replace(DUAL, bfloat16=True, shared=True, plus_one=1)),
        ("residual_norm_half (2, 2, 1) (32, 2, 1)", MODULATED),
        ("residual_norm_half (3, 2, 1) (32, 1, 1)", SHORT),  # a warp, and not all of it
        ("residual_norm_bfloat16_normed (3, 1, 1) (32, 5, 1)", NORMED),
        ("residual_norm_half_normed (4, 3, 1) (32, 1, 1)",
         ResidualCase((3, 2, 2, 16), "branch branch_bias branch_gamma gate", NO_NORM, shared=True)),
        ("residual_norm_bfloat16 (1, 1, 1) (32, 16, 1)",
         ResidualCase((1, 1, 12288), "branch gate shift", LAYER_NORM, bfloat16=True)),
        ("residual_norm_half (4, 1, 1) (32, 1, 1)",
         ResidualCase((4, 8), "branch gate gamma beta", RMS_NORM)),
        ("residual_norm_half (2, 1, 1) (32, 4, 1)",
         ResidualCase((1, 2, 3072), "scale shift", NO_NORM, kept=False)),
        ("float8_norm_half (2, 2, 1) (32, 2, 1)", replace(DUAL, float8=True)),
        ("float8_norm_bfloat16 (2, 2, 1) (32, 2, 1)", replace(MODULATED, float8=True, bfloat16=True)),
        ("float8_norm_half (3, 2, 1) (32, 1, 1)", replace(SHORT, float8=True)),
        ("float8_norm_bfloat16_normed (3, 1, 1) (32, 5, 1)", replace(NORMED, float8=True)),
    ],
    ids=str,
)  # fmt: skip
def test_sums_and_norms_are_right(launch: str, case: ResidualCase, program: Path, tmp_path: Path) -> None:
    assert residual(program, tmp_path, case) == launch


HALVES = ActivationCase((1, 5), 512, "halves", biases=True, behind=64, before=32, bfloat16=True)
WIDE = ActivationCase((3,), 6144, "own", biases=True)
UNEVEN = ActivationCase((7,), 2056, bfloat16=True)
"""257 vectors: two columns of blocks, of which the second is almost empty."""


@pytest.mark.parametrize(
    ("launch", "case"),
    [
        ("silu_gated_bfloat16 (1, 2, 1) (68, 3, 1)", HALVES),
        ("silu_gated_half (3, 3, 1) (256, 1, 1)", WIDE),
        ("silu_gated_half (1, 20, 1) (3, 85, 1)", ActivationCase((3000,), 16, "halves", before=8)),
        ("tanh_gelu_half (1, 1, 1) (2, 128, 1)", ActivationCase((2, 3), 16, biases=True)),
        ("tanh_gelu_bfloat16 (2, 7, 1) (256, 1, 1)", UNEVEN),
        ("float8_silu_gated_bfloat16 (5, 1, 1) (32, 1, 1)", replace(HALVES, float8=True)),
        ("float8_silu_gated_half (3, 1, 1) (32, 6, 1)", replace(WIDE, float8=True)),
        ("float8_tanh_gelu_bfloat16 (7, 1, 1) (32, 3, 1)", replace(UNEVEN, float8=True)),
        ("float8_tanh_gelu_half (2, 1, 1) (32, 12, 1)", ActivationCase((2,), 9216, before=3072, float8=True)),
    ],
    ids=str,
)
def test_activations_are_right(launch: str, case: ActivationCase, program: Path, tmp_path: Path) -> None:
    assert activation(program, tmp_path, case) == launch


@pytest.mark.parametrize(
    ("message", "case"),
    [
        ("not for this number of channels", ResidualCase((2, 2, 12), "branch")),
        ("not for this number of channels", ResidualCase((1, 1, 12296), "branch")),
        ("float8 needs a GPU of compute capability 8.9", ResidualCase((1, 1, 16), "scale", kept=False, float8=True)),
        ("two branches, and one with a norm", ResidualCase((1, 1, 16), "branch branch_gamma branch2")),
        ("x is too large", ResidualCase((65536, 1, 8), "branch")),
    ],
    ids=str,
)
def test_sums_and_norms_refuse_what_they_cannot_do(
    message: str, case: ResidualCase, program: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=message):
        residual(program, tmp_path, case, Gpu(4, 80))


@pytest.mark.parametrize(
    ("message", "name", "shape"),
    [
        ("an input of another size", "branch", (2, 3, 64)),
        ("an input of another size", "branch_bias", (128,)),
        ("not a row of channels for each image", "gate", (2, 32)),
        ("not a row of channels for each image", "gate", (3, 64)),
    ],
)
def test_inputs_of_other_sizes_are_refused(
    message: str, name: str, shape: tuple[int, ...], program: Path, tmp_path: Path
) -> None:
    case = ResidualCase((2, 4, 64), "branch branch_bias gate")
    feeds = dict(residual_feeds(case).inputs) | {name: np.zeros(shape, np.float16)}
    inputs = [feeds.get(each) for each in RESIDUAL_INPUTS]
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, Gpu(4), case.operator, inputs, 2, case.attributes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("not for these inputs", {"b": None}),
        ("not for rows of this size", {"b": np.zeros((3, 64), np.float16)}),
        ("not for rows of this size", {"a": np.zeros((2, 48), np.float16)}),
        ("not for rows of this size", {"before": np.zeros((3, 8), np.float16)}),
        ("a bias of another size", {"a_bias": np.zeros(32, np.float16)}),
    ],
)
def test_activations_refuse_what_they_cannot_do(
    message: str, changes: dict[str, np.ndarray | None], program: Path, tmp_path: Path
) -> None:
    case = ActivationCase((2,), 64, "own")
    feeds = {**activation_feeds(case), **changes}
    inputs = [feeds.get(name) for name in ACTIVATION_INPUTS]
    with pytest.raises(AssertionError, match=message):
        run(program, tmp_path, Gpu(4), case.operator, inputs, 1, case.attributes)


OUT_OF_BOUNDS = "AddressSanitizer: (heap|global)-buffer-overflow"
NOT_WRITTEN = "nan location mismatch"
WRONG = "Mismatched elements"
TOO_EARLY = "the result depends on which thread comes first"
FAULTS = {
    "a lane too many": ("residual_norm.cu", "lane(i) < lanes", "lane(i) <= lanes", SHORT, OUT_OF_BOUNDS),
    "no wait for the sum": ("residual_norm.cu", "    __syncthreads();\n", "", DUAL, f"{NOT_WRITTEN}|{TOO_EARLY}"),
    "a row's sums in one place": ("residual_norm.cu", "squares, shared[2])", "squares, shared[1])", DUAL, TOO_EARLY),
    "not waiting": ("residual_norm.cu", "    wait_for_earlier_kernels();\n", "", SHORT, "use-after-poison"),
    "without 1": ("residual_norm.cu", "of.plus_one >> k & 1", "of.plus_one >> k & 2", SHORT, WRONG),
    "another image's gate": ("residual_norm.c", "(int)(width / VECTOR)};", "(int)(width / 64)};", SHORT, WRONG),
    "the first part of the row": ("residual_norm.c", "at + 2 * first", "at", MODULATED, WRONG),
    "as float16": ("residual_norm.c", "2 * is_bfloat16(op) +", "", NORMED, f"{WRONG}|nan location"),
    "too few warps": ("residual_norm.c", "ceil_div(of.lanes, 32 * RESIDUAL_HELD)", "of.lanes / (33 * RESIDUAL_HELD)",
                      DUAL, NOT_WRITTEN),
    "the row's end": ("gated_activation.cu", "column >= to_step", "column > to_step", UNEVEN, OUT_OF_BOUNDS),
    "the gate's bias": ("gated_activation.cu", "of.b_bias[lane]", "of.a_bias[lane]", WIDE, WRONG),
    "the last columns": ("gated_activation.c", "ceil_div((int)width, wide)", "(int)width / wide", UNEVEN, NOT_WRITTEN),
}  # fmt: skip
"""What -> source, right, wrong, what shows it, how."""


@pytest.mark.parametrize("fault", sampled(FAULTS, lambda fault: FAULTS[fault][0], lambda fault: FAULTS[fault][-1]))
def test_a_planted_fault_is_found(fault: str, faulty: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    source, right, wrong, case, message = FAULTS[fault]
    program = faulty(source, right, wrong)
    with pytest.raises(AssertionError, match=message):
        if isinstance(case, ResidualCase):
            residual(program, tmp_path, case)
        else:
            activation(program, tmp_path, case)
