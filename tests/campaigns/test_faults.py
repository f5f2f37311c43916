"""Kills, signals, lost writes, full disks and changed inputs against real runs on one cache: `benchmarks/cache/faults.py`.

It fails for a damaged entry, a pipeline that is not whole, other digests than a fresh cache's, a run that does not end as it
should, and whatever is left behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = os.environ.get("SDFLOW_CAMPAIGN_SECONDS", "600")


@pytest.mark.skipif(sys.platform != "linux", reason="the campaign is for Linux")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["small", "operation", "power", "random", "signal", "full", "change"])
def test_the_cache_is_sound_after(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/cache/faults.py"), "--seconds", SECONDS, "--only", kind]
    done = subprocess.run([*command, "--scratch", str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
