"""What differs on Windows, as far as this machine shows it: no links, no folder locks, no exchange (docs/windows.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from test_assemble import SUBMODELS, artifacts, build, companions, make_artifacts  # noqa: F401

from sdflow.artifact import Artifact
from sdflow.locked_folder import alone_in, locked_folder, remove_if_abandoned, try_lock

ROOT = Path(__file__).parents[1]
COMPILED = (".so", ".pyd", ".dll", ".dylib", ".exe", ".o")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform of that name, and a file system that has no symbolic links."""

    def refuse(*names: object, **options: object) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(Path, "symlink_to", refuse)


@pytest.mark.usefixtures("windows")
def test_a_pipeline_folder_is_made_of_copies_and_replaced_without_links_locks_or_an_exchange(
    tmp_path: Path,
    artifacts: dict[str, Artifact],  # noqa: F811
    companions: dict[str, Path],  # noqa: F811
) -> None:
    out = tmp_path / "pipelines" / "one"
    assert build(out, artifacts, companions)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert {(out / name / "model.onnx").read_bytes()[:1] for name in SUBMODELS} == {b"a"}
    assert not build(out, artifacts, companions), "the same again changes nothing"
    assert build(out, make_artifacts(tmp_path / "other", b"b"), companions)
    assert {(out / name / "model.onnx").read_bytes()[:1] for name in SUBMODELS} == {b"b"}
    assert [path.name for path in out.parent.iterdir()] == ["one"], "nothing is left beside it"


@pytest.mark.usefixtures("windows")
def test_without_locks_nobody_waits_and_nothing_of_anybody_is_taken_for_abandoned(tmp_path: Path) -> None:
    with alone_in(tmp_path), alone_in(tmp_path):
        assert try_lock(tmp_path) is None
    with locked_folder(tmp_path / "mine") as folder:
        assert not remove_if_abandoned(folder)
        assert folder.is_dir()


def test_the_wheel_is_pure_python_and_for_every_system(tmp_path: Path) -> None:
    """Built by the backend that pip would call, without the network."""
    build_it = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build_it, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[-1]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert name == f"sdflow-{version}-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        inside = wheel.namelist()
        about = wheel.read(next(each for each in inside if each.endswith(".dist-info/WHEEL"))).decode()
        assert json.loads(wheel.read("sdflow/data/samples/shapes/model_index.json"))
    assert "Root-Is-Purelib: true" in about
    assert about.split("Tag: ")[1].split() == ["py3-none-any"]
    assert not [each for each in inside if each.endswith(COMPILED)]
    folded = [each.casefold() for each in inside]
    assert len(folded) == len(set(folded)), "two names differ in case alone"
    reserved = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10))}
    for each in inside:
        parts = each.split("/")
        assert not {part.casefold().split(".")[0] for part in parts} & reserved, each
        assert not any(part.endswith((".", " ")) or set(part) & set('<>:"|?*\\') for part in parts), each
        assert len(each) < 150, "with the path of an environment, Windows has 260 characters"
