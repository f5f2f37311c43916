"""The short form of `benchmarks/cache/faults.py`: a round of each kind of fault on real runs, and some on small artifacts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmark_report import benchmark_report


@pytest.mark.skipif(sys.platform != "linux", reason="kills at an operation, and looks at processes, as Linux has them")
def test_no_fault_leaves_a_bad_entry_a_broken_pipeline_or_anything_behind(tmp_path: Path) -> None:
    found = benchmark_report("cache/faults.py", "--rounds", "1", "--scratch", str(tmp_path), out=tmp_path)
    assert set(found["rounds"].values()) == {1}
    assert len(found["rounds"]) == 7
    assert found["counts"]["kills"] >= 45
    assert found["counts"]["bad"] == found["counts"]["left"] == 0
