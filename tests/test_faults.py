"""The short form of `benchmarks/faults.py`: a round of each kind of fault on real runs, and some on small artifacts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="kills at an operation, and looks at processes, as Linux has them")
def test_no_fault_leaves_a_bad_entry_a_broken_pipeline_or_anything_behind(tmp_path: Path) -> None:
    report = tmp_path / "faults.json"
    command = [
        sys.executable,
        "benchmarks/faults.py",
        "--rounds",
        "1",
        "--scratch",
        str(tmp_path),
        "--json",
        str(report),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert set(found["rounds"].values()) == {1}
    assert len(found["rounds"]) == 7
    assert found["counts"]["kills"] >= 45
    assert found["counts"]["bad"] == found["counts"]["left"] == 0
