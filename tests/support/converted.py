"""Submodels converted to ONNX, each once for a whole run of the tests: many files draw with the same small models."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import sdflow
from sdflow.artifact import Artifact
from sdflow.digest import FileEntry, digest_file, digest_json, digest_tree
from sdflow.passes.base import PassInputs
from sdflow.passes.onnx_conversion import OnnxConversion, OnnxConversionConfig
from sdflow.sources import Checkpoint

MADE_BY = ("families", "models", "onnx_model", "passes", "sources", "weights")
"""The packages of sdflow that have a hand in a conversion."""


def artifact_of(directory: Path) -> Artifact:
    """An artifact of the files in a directory."""
    entries = tuple(
        FileEntry(path.relative_to(directory).as_posix(), path.stat().st_size, digest_file(path))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    )
    return Artifact(digest_tree(entries), directory, entries)


def convert(name: str, load: Mapping[str, Any], family: str, out: Path) -> None:
    OnnxConversion().run(PassInputs(name, None, load, family), out, OnnxConversionConfig())


@dataclass(frozen=True)
class Converted:
    """kept: the folder of what every run with the same code may use. own: of what was made from files of one test."""

    kept: Path
    own: Path

    def __call__(self, checkpoint: Checkpoint, names: Collection[str] | None = None) -> dict[str, Artifact]:
        """The checkpoint's submodels, by default all but the safety checker, float32 and not fused. Not to be written to."""
        if names is None:
            names = [name for name in checkpoint.submodels if name != checkpoint.family.checker]
        return {name: self._artifact(name, checkpoint) for name in names}

    def _artifact(self, name: str, checkpoint: Checkpoint) -> Artifact:
        load, family = checkpoint.submodels[name].load, checkpoint.family.name
        root = self.own if any(Path(text).is_absolute() for text in texts(load)) else self.kept
        path = root / digest_json([name, load, family])
        with FileLock(path.with_suffix(".lock")):  # the other worker of pytest-xdist waits
            if not path.exists():
                building = path.with_suffix(".building")
                shutil.rmtree(building, ignore_errors=True)  # of a run that was killed
                building.mkdir()
                convert(name, load, family, building)
                building.rename(path)
        return artifact_of(path)


def texts(value: Any) -> Iterator[str]:
    """Every text within a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts(each)


@pytest.fixture(scope="session")
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Gives a checkpoint's converted submodels; kept in pytest's cache for as long as nothing that makes them changes."""
    package = Path(sdflow.__file__).parent
    code = [path.read_text() for name in MADE_BY for path in sorted((package / name).rglob("*.py"))]
    versions = {name: version(name) for name in OnnxConversion.uses}
    root = request.config.cache.mkdir("converted")
    kept = root / digest_json([code, versions])
    with FileLock(request.config.cache.mkdir("locks") / "converted"):
        for old in root.iterdir():
            if old != kept:
                shutil.rmtree(old)
        kept.mkdir(exist_ok=True)
    return Converted(kept, tmp_path_factory.mktemp("converted"))
