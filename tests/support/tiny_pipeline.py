"""The small Stable Diffusion (`synthetic:sd15-tiny`) as PyTorch pipeline, as artifacts, and as an assembled folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted import Converted
from submodels import SUBMODELS

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble
from sdflow.manifest import Origin
from sdflow.sources import Checkpoint, PlainDigests, load_pipeline, open_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Checkpoint:
    return open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)


@pytest.fixture(scope="session")
def tiny_torch(tiny_checkpoint: Checkpoint) -> Any:
    pipeline = load_pipeline(tiny_checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def tiny_artifacts(tiny_checkpoint: Checkpoint, converted: Converted) -> dict[str, Artifact]:
    """The converted submodels, float32."""
    return converted(tiny_checkpoint, SUBMODELS)


@pytest.fixture(scope="session")
def tiny_pipeline(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("pipelines") / "tiny"
    assemble(out, parts=tiny_artifacts, companions=tiny_checkpoint.companions, origin=Origin("tiny", "cpu"))
    return out
