"""The workflows to extend are found from any folder, in a checkout and in an installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import sdflow
from sdflow.config import load_workflow
from sdflow.disk.shipped import shipped_workflow, shipped_workflows
from sdflow.errors import WorkflowError
from sdflow.passes.registry import catalog

ROOT = Path(sdflow.__file__).parents[1]
WORKFLOW = "extends: base/tiny.yaml\ntarget: cpu\n"


def test_a_base_that_is_not_beside_the_file_is_the_one_that_ships(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(WORKFLOW)
    loaded = load_workflow(tmp_path / "mine.yaml", catalog=catalog())
    assert loaded.pipelines[0].model == "synthetic:sd15-tiny"
    assert shipped_workflow("base/tiny.yaml") in loaded.files


def test_a_base_beside_the_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tiny.yaml").write_text("extends: ../base/sd21.yaml\nmodel: synthetic:sd21-tiny\n")
    (tmp_path / "mine.yaml").write_text(WORKFLOW)
    with pytest.raises(WorkflowError, match=r"there is no file .*base/sd21.yaml"):
        load_workflow(tmp_path / "mine.yaml", catalog=catalog())


def test_a_misspelt_base_is_told_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: base/sd15x.yaml\ntarget: cpu\n")
    with pytest.raises(WorkflowError, match=r"did you mean 'base/sd15.yaml'"):
        load_workflow(tmp_path / "mine.yaml", catalog=catalog())


def outside_targets(value: object, *path: object) -> list[object]:
    """The passes after a conversion that must fuse a number, said for no target."""
    if path == ("targets",):
        return []
    if isinstance(value, list):
        return [found for index, each in enumerate(value) for found in outside_targets(each, *path, index)]
    if not isinstance(value, dict):
        return []
    here = [path] if "expect" in value and value.get("pass") != "OnnxConversion" else []
    return here + [found for name, each in value.items() for found in outside_targets(each, *path, name)]


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "workflows").glob("*.yaml")), *map(shipped_workflow, shipped_workflows())],
    ids=lambda path: path.stem,
)
def test_what_a_fusion_must_find_is_said_for_a_target(path: Path) -> None:
    """Every target fuses otherwise: a number that is one target's ends the build for the others."""
    assert outside_targets(yaml.safe_load(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("reference", ["sd15.yaml", "base/../base/sd15.yaml", "/base/sd15.yaml", "base/no.yaml"])
def test_only_a_base_is_looked_for(reference: str) -> None:
    assert shipped_workflow(reference) is None


def test_an_installed_package_has_them_too(tmp_path: Path) -> None:
    """The package laid out as the wheel lays it out, far from the checkout."""
    shutil.copytree(ROOT / "sdflow", tmp_path / "site/sdflow", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mine.yaml").write_text(WORKFLOW)
    done = subprocess.run(
        [sys.executable, "-m", "sdflow", "validate", "mine.yaml"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mine.yaml: valid" in done.stdout
    assert {Path(name).name for name in shipped_workflows()} == {
        path.name for path in (tmp_path / "site/sdflow/families").glob("*/workflows/base/*.yaml")
    }
