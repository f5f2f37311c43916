"""Each figure of a latency table is what its definition says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdflow.bench.latency import measure, percentile, summarize

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


def test_the_first_run_is_apart_and_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on while something runs, and by as much as that takes."""
    took, now = iter([50, 30, 30, 1, 3, 2]), 0

    def run() -> None:
        nonlocal now
        now += next(took) * 1_000_000

    monkeypatch.setattr("time.perf_counter_ns", lambda: now)
    found = measure(run, warmup=2, runs=3)
    assert (found.first_ms, found.min_ms, found.median_ms, found.p99_ms) == (50, 1, 2, 3)
    assert next(took, None) is None
