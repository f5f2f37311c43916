"""Latency statistics, with exact definitions."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    """Wall-clock times of a repeated operation, in milliseconds.

    first_ms: the very first run, which compiles, allocates and tunes. warmup: uncounted runs after it. runs: the
    counted ones, to which all other figures refer.
    median_ms: the middle value, or the mean of the two middle ones.
    p90_ms, p99_ms: nearest rank: the smallest measured value that at least 90 % (99 %) of the runs do not exceed. With
    fewer than 10 (100) runs, the slowest run.
    """

    first_ms: float
    warmup: int
    runs: int
    min_ms: float
    mean_ms: float
    median_ms: float
    p90_ms: float
    p99_ms: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the value of rank ceil(percent / 100 x n) in ascending order.

    Raises ValueError without values, or unless 0 < percent <= 100.
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(values)} values")
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def summarize(first_ms: float, warmup: int, times_ms: Sequence[float]) -> Latency:
    """The statistics of the counted runs' times. Raises ValueError if there are none."""
    return Latency(
        first_ms=first_ms,
        warmup=warmup,
        runs=len(times_ms),
        min_ms=min(times_ms),
        mean_ms=statistics.fmean(times_ms),
        median_ms=statistics.median(times_ms),
        p90_ms=percentile(times_ms, 90),
        p99_ms=percentile(times_ms, 99),
    )


def measure(run: Callable[[], object], *, warmup: int, runs: int) -> Latency:
    """Time `run`: once, then `warmup` times uncounted, then `runs` times."""
    first_ms = _milliseconds(run)
    for _ in range(warmup):
        run()
    return summarize(first_ms, warmup, [_milliseconds(run) for _ in range(runs)])


def _milliseconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1e6
