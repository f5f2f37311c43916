"""What passes and what does not, from the distances alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from sdflow.verify.artifact.judge_output import judge_output
from sdflow.verify.result import CaseDistance


def cases(distances: Sequence[float], yardsticks: Sequence[float]) -> list[CaseDistance]:
    pairs = zip(distances, yardsticks, strict=True)
    return [CaseDistance(f"case {i}", "trajectory", "sample", i, 500.0, *pair) for i, pair in enumerate(pairs)]


def test_a_float16_artifact_passes_up_to_1_2_times_fp16_pytorch() -> None:
    yardsticks = [1e-3, 2e-3, 3e-3]
    assert judge_output("sample", "float16", cases([1.19 * each for each in yardsticks], yardsticks)).passed
    assert not judge_output("sample", "float16", cases([1.21 * each for each in yardsticks], yardsticks)).passed


def test_distances_are_told_as_root_mean_squares_of_the_cases() -> None:
    found = judge_output("sample", "float16", cases([3e-3, 4e-3], [3e-3, 8e-3]))
    assert found.distance == pytest.approx(math.sqrt((9e-6 + 16e-6) / 2))
    assert found.yardstick == pytest.approx(math.sqrt((9e-6 + 64e-6) / 2))
    assert found.ratio == pytest.approx(math.sqrt((1 + 0.25) / 2)), "and what is judged: each case in units of its own"


def test_one_case_that_is_far_for_pytorch_too_does_not_hide_the_others() -> None:
    yardsticks = [1e-3] * 7 + [9e-2]  # as at a normalization over two numbers that are nearly equal
    assert judge_output("sample", "float16", cases(yardsticks, yardsticks)).passed
    assert not judge_output("sample", "float16", cases([1.6e-3] * 7 + [9e-2], yardsticks)).passed


def test_the_limit_is_where_an_artifact_would_just_pass() -> None:
    yardsticks, distances = [1e-3, 2e-3, 3e-2], [0.9e-3, 2.1e-3, 2.8e-2]
    found = judge_output("sample", "float16", cases(distances, yardsticks))
    for share, passes in ((0.999, True), (1.001, False)):
        scaled = [each * share * found.limit / found.distance for each in distances]
        assert judge_output("sample", "float16", cases(scaled, yardsticks)).passed is passes


def test_where_pytorch_loses_nothing_nothing_may_be_lost() -> None:
    assert judge_output("sample", "float16", cases([1e-3, 0.0], [1e-3, 0.0])).passed
    assert not judge_output("sample", "float16", cases([1e-3, 1e-6], [1e-3, 0.0])).passed


def test_scatter_widens_the_limit_by_two_standard_errors_and_no_further_than_a_quarter() -> None:
    spread = [math.exp(-0.1), 1.0, math.exp(0.1)]
    found = judge_output("sample", "float16", cases([1e-3 * each for each in spread], [1e-3] * 3))
    assert found.limit == pytest.approx(1.2e-3 * math.exp(2 * 0.1 / math.sqrt(3)))
    wild = judge_output("sample", "float16", cases([1e-4, 1.9e-3, 1e-5], [1e-3] * 3))
    assert wild.limit == pytest.approx(1.2e-3 * 1.25)


def test_no_single_case_may_be_twice_as_far() -> None:
    yardsticks = [1e-3] * 20
    distances = [0.5e-3] * 19 + [2.1e-3]
    found = judge_output("sample", "float16", cases(distances, yardsticks))
    assert found.distance <= found.limit
    assert not found.passed


def test_a_float32_artifact_is_held_to_what_float32_needs_whatever_fp16_pytorch_does() -> None:
    assert judge_output("sample", "float32", cases([0.9e-5] * 3, [1.0] * 3)).passed
    assert not judge_output("sample", "float32", cases([1.1e-5] * 3, [1.0] * 3)).passed


def test_one_case_of_a_float32_artifact_may_be_as_far_as_rounding_explains() -> None:
    near = [1e-6] * 4
    for distance, yardstick, passes in (
        (4.5e-5, 9.4e-3, True),  # measured
        (4.5e-5, 2e-3, False),
        (0.9e-4, math.inf, True),
        (1.1e-4, math.inf, False),
        (math.inf, math.inf, False),
    ):
        found = judge_output("sample", "float32", cases([*near, distance], [2e-3] * 4 + [yardstick]))
        assert found.passed is passes, (distance, yardstick)
        assert (found.distance <= found.limit) is passes or distance == math.inf


def test_a_device_sums_up_in_its_own_order() -> None:
    assert judge_output("sample", "float32", cases([0.9e-4] * 3, [1e-3] * 3), on_device=True).passed
    assert not judge_output("sample", "float32", cases([1.1e-4] * 3, [1.0] * 3), on_device=True).passed


def test_nan_does_not_pass_even_where_fp16_pytorch_has_it_too() -> None:
    assert not judge_output("sample", "float16", cases([1e-3, math.inf], [1e-3, math.inf])).passed


def test_where_fp16_pytorch_overflows_ten_roundings_are_allowed() -> None:
    assert judge_output("sample", "float16", cases([1e-3, 4e-3], [1e-3, math.inf])).passed
    assert not judge_output("sample", "float16", cases([1e-3, 1e-2], [1e-3, math.inf])).passed
    assert judge_output("sample", "float16", cases([4e-3, 4e-3], [math.inf] * 2)).passed
    assert not judge_output("sample", "float16", cases([1e-2, 1e-2], [math.inf] * 2)).passed
