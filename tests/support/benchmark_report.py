"""What a command of benchmarks/ writes with --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shell import ROOT


def benchmark_report(script: str, *options: str, out: Path) -> Any:
    """Run it in a process of its own; it must end well. out: a folder for its report."""
    report = out / "report.json"
    command = [sys.executable, f"benchmarks/{script}", *options, "--json", str(report)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())
