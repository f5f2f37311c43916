"""The small pipeline as `sdflow run` leaves it: its manifest says what it was built from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdflow.artifact import Artifact
from sdflow.assemble import assemble
from sdflow.sources import Checkpoint


@pytest.fixture(scope="session")
def built(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("bench") / "tiny"
    manifest = {
        "name": "tiny",
        "target": "cpu",
        "model": "synthetic:sd15-tiny",
        "checkpoint": tiny_checkpoint.provenance,
        "loras": [],
    }
    # As a manifest that was read from its file has it.
    manifest = json.loads(json.dumps(manifest))
    assemble(out, parts=tiny_artifacts, companions=tiny_checkpoint.companions, manifest=manifest, copy=True)
    return out


@pytest.fixture(autouse=True)
def tuning_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Choices of whoever runs the tests are not used, and not overwritten."""
    monkeypatch.setenv("SDFLOW_TUNING", str(tmp_path / "tuning"))
    return tmp_path / "tuning"
