"""The short form of `benchmarks/cache/fuzz.py`: whatever an input holds is read, or told in words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmark_report import benchmark_report

COUNT = 100
KINDS = ("header", "manifest", "graph", "format")
"""Those that take seconds. LoRAs, configs and workflows are for a benchmark run."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time, as Linux has them")
@pytest.mark.timeout(600)
def test_no_input_ends_in_a_traceback_or_a_hang(tmp_path: Path) -> None:
    found = benchmark_report("cache/fuzz.py", "--count", str(COUNT), "--seed", "1", "--only", *KINDS, out=tmp_path)
    assert list(found) == list(KINDS)
    for kind, each in found.items():
        assert sum(each["became"].values()) == COUNT
        assert each["became"]["refused"] > COUNT // 5, kind
        assert any(what.startswith("taken") for what in each["became"]), kind
