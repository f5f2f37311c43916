"""Each figure of a latency table is what its definition says."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdflow.evaluate.statistics import measure, percentile, summarize

times = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=300)


@given(times, st.floats(min_value=0.01, max_value=100))
def test_a_percentile_is_the_least_value_that_enough_runs_did_not_exceed(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    enough = percent / 100 * len(values)
    assert found in values
    assert sum(value <= found for value in values) >= enough - 1e-9 * len(values)
    smaller = [value for value in values if value < found]
    assert not smaller or sum(value <= max(smaller) for value in values) < enough + 1e-9 * len(values)


@given(times, st.sampled_from([50, 90, 99, 100]))
def test_percentiles_agree_with_numpys_inverted_cdf(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


@given(times)
def test_the_figures_are_in_order(values: list[float]) -> None:
    found = summarize(1.0, 0, values)
    assert min(values) == found.min_ms <= found.median_ms <= found.p90_ms <= found.p99_ms <= max(values)
    assert found.min_ms - 1e-6 <= found.mean_ms <= max(values) * (1 + 1e-12) + 1e-6
    assert found.runs == len(values)


def test_by_hand() -> None:
    found = summarize(99.0, 2, [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert (found.first_ms, found.warmup, found.runs) == (99.0, 2, 10)
    assert (found.min_ms, found.median_ms, found.mean_ms) == (1.0, 5.5, 5.5)
    assert (found.p90_ms, found.p99_ms) == (9.0, 10.0)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_what_has_no_percentile_is_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, percent)


def test_the_first_run_is_apart_and_warm_up_is_not_counted() -> None:
    naps = iter([0.05, 0.03, 0.03, 0.001, 0.001, 0.001])
    found = measure(lambda: time.sleep(next(naps)), warmup=2, runs=3)
    assert found.first_ms >= 50
    assert 1 <= found.min_ms <= found.median_ms < 30
    assert next(naps, None) is None
