"""A family that is defined in tests alone is known to every command that looks at a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_flux_checkpoint import OTHER_FAMILIES, tiny_flux


def run(folder: Path, *command: str) -> str:
    """With the family on the import path, as all processes that it starts."""
    environment = {**os.environ, "PYTHONPATH": str(OTHER_FAMILIES)}
    done = subprocess.run(
        [sys.executable, "-m", "sdflow", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other_family")
    tiny_flux().save_pretrained(folder / "flux")
    return folder


def test_a_family_defined_in_tests_is_inspected_and_planned(folder: Path) -> None:
    assert "flux-tiny" in run(folder, "inspect", "flux")
    run(folder, "init", "--model", "flux", "--out", "w.yaml")
    assert "transformer" in run(folder, "plan", "w.yaml")
