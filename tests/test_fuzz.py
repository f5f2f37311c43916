"""The short form of `benchmarks/fuzz.py`: whatever an input holds is read, or told in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COUNT = 200
KINDS = ("header", "manifest", "graph")
"""Those that take seconds. LoRAs, configs and workflows are for a benchmark run."""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time, as Linux has them")
@pytest.mark.timeout(600)
def test_no_input_ends_in_a_traceback_or_a_hang(tmp_path: Path) -> None:
    report = tmp_path / "fuzz.json"
    command = [
        sys.executable,
        "benchmarks/fuzz.py",
        "--count",
        str(COUNT),
        "--seed",
        "1",
        "--only",
        *KINDS,
        "--json",
        str(report),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert list(found) == list(KINDS)
    for kind, each in found.items():
        assert sum(each["became"].values()) == COUNT
        assert each["became"]["refused"] > COUNT // 5, kind
        assert any(what.startswith("taken") for what in each["became"]), kind
