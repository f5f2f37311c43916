"""The small pipeline as `sdflow run` leaves it: its manifest says what it was built from."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.manifest import Origin
from sdflow.sources import Checkpoint


@pytest.fixture(scope="session")
def built(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("bench") / "tiny"
    origin = Origin("tiny", "cpu", "synthetic:sd15-tiny", tiny_checkpoint.provenance)
    assemble(out, parts=tiny_artifacts, companions=tiny_checkpoint.companions, origin=origin, copy=True)
    return out


@pytest.fixture(autouse=True)
def tuning_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Choices of whoever runs the tests are not used, and not overwritten."""
    monkeypatch.setenv("SDFLOW_TUNING", str(tmp_path / "tuning"))
    return tmp_path / "tuning"
