"""Modules that begin a process import on their own. Commands that tests fork find sdflow's modules imported already, which
would hide a circular import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sdflow

PACKAGE = Path(sdflow.__file__).parent
ENTRIES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if "worker" in path.stem
)


@pytest.mark.parametrize("module", ["sdflow.cli.app", *ENTRIES])
def test_it_imports_alone(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
