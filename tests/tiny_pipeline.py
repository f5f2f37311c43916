"""The small Stable Diffusion (`synthetic:sd15-tiny`) as PyTorch pipeline, as artifacts, and as an assembled folder."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from submodels import SUBMODELS

import sdflow.passes
import sdflow.sources
from sdflow.artifact import Artifact
from sdflow.assemble import assemble
from sdflow.digest import FileEntry, digest_file, digest_json, digest_tree
from sdflow.manifest import Origin
from sdflow.passes.base import PassInputs
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig
from sdflow.sources import Checkpoint, PlainDigests, load_pipeline, open_checkpoint


def artifact_of(directory: Path) -> Artifact:
    """An artifact of the files in a directory."""
    entries = tuple(
        FileEntry(path.relative_to(directory).as_posix(), path.stat().st_size, digest_file(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    )
    return Artifact(digest_tree(entries), directory, entries)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Checkpoint:
    return open_checkpoint("synthetic:sd15-tiny", digests=PlainDigests(), download=False)


@pytest.fixture(scope="session")
def tiny_torch(tiny_checkpoint: Checkpoint) -> Any:
    pipeline = load_pipeline(tiny_checkpoint)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def tiny_artifacts(tiny_checkpoint: Checkpoint, request: pytest.FixtureRequest) -> dict[str, Artifact]:
    """The converted submodels, float32; kept in pytest's cache for as long as nothing that makes them changes."""
    made_by = [sdflow.passes, sdflow.sources]
    code = [path.read_text() for module in made_by for path in sorted(Path(module.__path__[0]).rglob("*.py"))]
    versions = [version(name) for name in OnnxConversion.uses]
    root = request.config.cache.mkdir("tiny-artifacts") / digest_json([code, versions])
    with FileLock(request.config.cache.mkdir("locks") / "tiny-artifacts"):  # the other worker of pytest-xdist waits
        if not root.exists():
            shutil.rmtree(root.parent)
            building = root.with_name("building")
            for submodel in SUBMODELS:
                (building / submodel).mkdir(parents=True)
                inputs = PassInputs(submodel, None, tiny_checkpoint.submodels[submodel].load)
                OnnxConversion().run(inputs, building / submodel, OnnxConversionConfig())
            building.rename(root)
    return {submodel: artifact_of(root / submodel) for submodel in SUBMODELS}


@pytest.fixture(scope="session")
def tiny_pipeline(
    tiny_checkpoint: Checkpoint, tiny_artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("pipelines") / "tiny"
    assemble(out, parts=tiny_artifacts, companions=tiny_checkpoint.companions, origin=Origin("tiny", "cpu"))
    return out
