"""Untrusted inputs, mutated: `benchmarks/cache/fuzz.py`, each kind for a share of the time, with another seed.

It fails for an exception that is not sdflow's, a file written outside its folder, a process that dies or takes more memory or
time than its limits, and a merge that is not PEFT's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = os.environ.get("SDFLOW_CAMPAIGN_SECONDS", "600")
SEED = os.environ.get("SDFLOW_CAMPAIGN_SEED", "1")


@pytest.mark.skipif(sys.platform != "linux", reason="the campaign is for Linux")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["header", "lora", "config", "workflow", "manifest", "graph", "format"])
def test_no_mutated_input_does_anything_but_be_read_or_refused(kind: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/cache/fuzz.py"),
        "--seconds",
        SECONDS,
        "--seed",
        SEED,
        "--only",
        kind,
    ]
    done = subprocess.run([*command, "--samples", str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
