"""A pipeline whose sdflow.json is damaged or gone is built anew where a pin proves that it is one, and only then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.manifest import read_manifest
from sdflow.store import Cache

from .builds import write_files
from .test_pins import SUBMODELS, build


@pytest.fixture
def project(memory_path: Path) -> Path:
    """A folder for a cache and pipelines, and a checkpoint beside it."""
    write_files(memory_path / "checkpoint", {"scheduler/scheduler_config.json": b'{"_class_name": "DDIMScheduler"}'})
    (memory_path / "project").mkdir()
    return memory_path / "project"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def exchanged(path: Path) -> None:
    path.unlink()
    path.write_text("{}")


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def a_link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGE: tuple[Callable[[Path], None], ...] = (Path.unlink, truncated, exchanged, zeroed, a_link_to_nothing)


def whole(folder: Path) -> bool:
    return read_manifest(folder).origin.name != "" and all(
        (folder / name / "model.onnx").is_file() for name in SUBMODELS
    )


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_pipeline_that_lost_its_manifest_is_built_anew(
    project: Path,
    damage: Callable[[Path], None],
    copy: bool,
) -> None:
    folder = build(project, "one", copy=copy)
    damage(folder / "sdflow.json")
    build(project, "one", copy=copy)
    assert whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_it_is_built_anew_as_another_pipeline_with_fewer_files(project: Path, damage: Callable[[Path], None]) -> None:
    """What the new one does not have is known from the pin."""
    folder = build(project, "one", copy=True)
    damage(folder / "sdflow.json")
    build(project, "two")
    assert whole(folder) and read_manifest(folder).origin.name == "two"


@pytest.mark.parametrize("damage", DAMAGE)
def test_collection_keeps_what_a_pipeline_without_manifest_uses_and_the_proof(
    project: Path,
    damage: Callable[[Path], None],
) -> None:
    folder = build(project, "one")
    damage(folder / "sdflow.json")
    Cache(project / "cache").gc(0)
    assert all((folder / name / "model.onnx").is_file() for name in SUBMODELS)
    build(project, "one")
    assert whole(folder)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("place", ["notes.txt", "scheduler/mine.json", "sdflow.json.bak"])
def test_a_users_file_in_it_is_kept_and_named(project: Path, place: str, copy: bool) -> None:
    folder = build(project, "one", copy=copy)
    (folder / "sdflow.json").unlink()
    (folder / place).write_text("mine")
    with pytest.raises(UsageError, match=Path(place).name):
        build(project, "one", copy=copy)
    assert (folder / place).read_text() == "mine"


@pytest.mark.parametrize("copy", [False, True])
def test_what_somebody_put_in_its_place_is_kept(project: Path, copy: bool) -> None:
    """Files of the same names, in a folder that has the pin of a pipeline that is gone."""
    folder = build(project, "one", copy=copy)
    shutil.rmtree(folder)
    for name in SUBMODELS:
        (folder / name).mkdir(parents=True)
        (folder / name / "model.onnx").write_text("mine")
    (folder / "model_index.json").write_text("{}")
    with pytest.raises(UsageError, match="not an sdflow pipeline, and is not replaced"):
        build(project, "one", copy=True)
    assert (folder / SUBMODELS[0] / "model.onnx").read_text() == "mine"


def test_without_a_pin_the_message_says_what_to_do(project: Path) -> None:
    folder = build(project, "one")
    truncated(folder / "sdflow.json")
    moved = folder.rename(folder.with_name("moved"))
    with pytest.raises(UsageError) as caught:
        build(project, "one", "pipelines/moved")
    assert "its sdflow.json does not list its files" in caught.value.what
    assert "delete it and run again" in (caught.value.remedy or "")
    assert (moved / "scheduler").is_dir()


def test_a_pipeline_of_a_newer_sdflow_is_not_replaced(project: Path) -> None:
    folder = build(project, "one")
    content = '{"format_version": 99}'
    (folder / "sdflow.json").write_text(content)
    with pytest.raises(UsageError, match="a newer sdflow wrote it"):
        build(project, "one")
    assert (folder / "sdflow.json").read_text() == content
