"""Pipeline folders: what they hold, and that nothing of anybody's is lost when one is replaced."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from converted import artifact_of
from small_workflows import Events
from until import PATIENCE

from sdflow.artifact import Artifact
from sdflow.build.assemble import assemble, link_target
from sdflow.config import load_workflow
from sdflow.disk.locked_folder import locked_folder
from sdflow.errors import CacheError, UsageError
from sdflow.manifest import Chain, FinishedPass, Origin, read_manifest
from sdflow.passes import registry
from sdflow.run.options import RunOptions
from sdflow.run.run import run_workflow
from sdflow.store import Cache

SUBMODELS = ("text_encoder", "unet", "vae_decoder")
ROOT = Path(__file__).parents[2]


def make_artifacts(root: Path, content: bytes, size: int = 1000) -> dict[str, Artifact]:
    """Artifacts whose files all hold `content` over and over; no ONNX is needed to put folders together."""
    for submodel in SUBMODELS:
        folder = root / submodel
        folder.mkdir(parents=True)
        for name in ("model.onnx", "model.onnx.data", "config.json"):
            (folder / name).write_bytes(content * size)
            (folder / name).chmod(0o444)
    return {submodel: artifact_of(root / submodel) for submodel in SUBMODELS}


@pytest.fixture
def companions(tmp_path: Path) -> dict[str, Path]:
    folders = {name: tmp_path / "checkpoint" / name for name in ("tokenizer", "scheduler")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    (folders["tokenizer"] / "vocab.json").write_text("{}")
    (folders["scheduler"] / "scheduler_config.json").write_text('{"_class_name": "DDIMScheduler"}')
    return folders


@pytest.fixture
def artifacts(tmp_path: Path) -> dict[str, Artifact]:
    return make_artifacts(tmp_path / "cache", b"a")


def build(out: Path, artifacts: dict[str, Artifact], companions: dict[str, Path], **options: bool) -> bool:
    return assemble(out, parts=artifacts, companions=companions, origin=Origin("test", "cpu"), **options).changed


def test_submodels_are_directory_links_and_the_rest_real_files(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]
) -> None:
    out = tmp_path / "pipelines" / "one"
    assert build(out, artifacts, companions)
    for name in SUBMODELS:
        assert (out / name).is_symlink()
        assert (out / name).resolve() == artifacts[name].path
        assert not (out / name / "model.onnx.data").is_symlink(), "onnx refuses weight files that are links"
    assert not (out / "tokenizer").is_symlink()
    index = json.loads((out / "model_index.json").read_text())
    assert index["scheduler"] == ["diffusers", "DDIMScheduler"]
    assert index["unet"] == ["diffusers", "OnnxRuntimeModel"]


def test_without_a_safety_checker_none_is_asked_for(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]
) -> None:
    build(tmp_path / "out", artifacts, companions)
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None]
    assert index["feature_extractor"] == [None, None]
    assert index["requires_safety_checker"] is False


def test_the_manifest_tells_what_each_part_is(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]
) -> None:
    unet = Chain(None, (FinishedPass("OnnxConversion", "0" * 64, {}, {}, {"nodes": 3}),))
    origin = Origin("test", "cpu", chains={"unet": unet})
    assemble(tmp_path / "out", parts=artifacts, companions=companions, origin=origin)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.origin == origin
    assert manifest.artifacts == {name: artifact.digest for name, artifact in artifacts.items()}
    assert manifest.parts["unet"].files == artifacts["unet"].files
    assert str(tmp_path) not in (tmp_path / "out" / "sdflow.json").read_text(), "it names no place of this machine"


def test_a_moved_project_keeps_its_pipelines(
    tmp_path: Path, companions: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nowhere/else")
    artifacts = make_artifacts(tmp_path / "project" / "cache", b"a")
    build(tmp_path / "project" / "pipelines" / "one", artifacts, companions)
    (tmp_path / "project").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "pipelines" / "one" / "unet" / "model.onnx").read_bytes() == b"a" * 1000


def test_links_are_absolute_where_only_the_home_directory_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert link_target(tmp_path / "project" / "out", tmp_path / ".cache" / "unet").is_absolute()
    assert not link_target(tmp_path / "project" / "out", tmp_path / "project" / "cache" / "unet").is_absolute()


def test_a_copy_needs_no_cache(tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]) -> None:
    out = tmp_path / "out"
    assert build(out, artifacts, companions, copy=True)
    shutil.rmtree(tmp_path / "cache")
    assert (out / "unet" / "model.onnx.data").read_bytes() == b"a" * 1000
    assert os.access(out / "unet" / "model.onnx.data", os.W_OK), "the copy is the user's own"
    assert not any(path.is_symlink() for path in out.rglob("*"))


@pytest.mark.parametrize("copy", [False, True])
def test_a_second_run_writes_nothing(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path], copy: bool
) -> None:
    out = tmp_path / "out"
    build(out, artifacts, companions, copy=copy)
    before = out.stat().st_ino, (out / "sdflow.json").stat().st_mtime_ns
    assert not build(out, artifacts, companions, copy=copy)
    assert (out.stat().st_ino, (out / "sdflow.json").stat().st_mtime_ns) == before
    assert build(out, artifacts, companions, copy=not copy), "links and copies are not the same pipeline"


def test_a_damaged_pipeline_is_made_anew(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]
) -> None:
    out = tmp_path / "out"
    build(out, artifacts, companions)
    (out / "tokenizer" / "vocab.json").unlink()
    assert build(out, artifacts, companions)
    assert (out / "tokenizer" / "vocab.json").is_file()


def test_replacing_leaves_only_the_new_pipeline(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]
) -> None:
    out = tmp_path / "pipelines" / "one"
    build(out, artifacts, companions)
    changed = make_artifacts(tmp_path / "other", b"b")
    assert build(out, {**artifacts, "unet": changed["unet"]}, companions)
    assert (out / "unet" / "model.onnx").read_bytes() == b"b" * 1000
    assert (out / "vae_decoder" / "model.onnx").read_bytes() == b"a" * 1000
    assert [path.name for path in out.parent.iterdir()] == ["one"], "nothing is left beside it"
    assert (tmp_path / "cache" / "unet" / "model.onnx").exists(), "removing the old folder follows no link"


@pytest.mark.parametrize("kind", ["folder", "file", "link", "other manifest"])
def test_what_sdflow_did_not_make_is_not_replaced(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path], kind: str
) -> None:
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    if kind == "folder":
        out = theirs
    elif kind == "file":
        out.write_text("mine")
    elif kind == "link":
        out.symlink_to(theirs)
    else:
        out = theirs
        (theirs / "sdflow.json").write_text('{"format_version": 99}')
    with pytest.raises(UsageError, match="not replaced"):
        build(out, artifacts, companions)
    assert (theirs / "notes.txt").read_text() == "mine"
    assert out.is_symlink() == (kind == "link")


@pytest.mark.parametrize("place", ["notes.txt", "tokenizer/mine.json"])
def test_a_users_file_in_a_pipeline_is_kept(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path], place: str
) -> None:
    out = tmp_path / "out"
    build(out, artifacts, companions)
    (out / place).write_text("mine")
    with pytest.raises(UsageError, match=Path(place).name):
        build(out, make_artifacts(tmp_path / "other", b"b"), companions)
    assert (out / place).read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "file", "users file", "damaged"])
def test_a_run_refuses_what_is_not_a_pipeline_before_it_builds_anything(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path], kind: str
) -> None:
    workflow = load_workflow(ROOT / "workflows/tiny_cpu.yaml", catalog=registry.catalog())
    out, events = tmp_path / "out" / workflow.pipelines[0].name, Events()
    out.parent.mkdir()
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    else:
        build(out, artifacts, companions)
        (out / ("notes.txt" if kind == "users file" else "sdflow.json")).write_text("mine")
    with pytest.raises(UsageError, match="not replaced"):
        run_workflow(workflow, Cache(tmp_path / "cache2"), RunOptions(tmp_path / "out", tmp_path / "results"), events)
    assert events.heard == []


def test_an_empty_folder_is_filled(tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]) -> None:
    (tmp_path / "out").mkdir()
    assert build(tmp_path / "out", artifacts, companions)
    assert read_manifest(tmp_path / "out").origin.name == "test"


# A process that puts pipeline a and pipeline b in the same place, in turn, until it is killed.
ALTERNATE = """
    import pickle, sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from sdflow.build.assemble import assemble
    from sdflow.manifest import Origin
    root = Path(sys.argv[2])
    parts, companions = pickle.loads((root / "arguments").read_bytes())
    print("ready", flush=True)
    while True:
        for kind in "ab":
            assemble(root / "out", parts=parts[kind], companions=companions, origin=Origin(kind, "cpu"), copy=True)
"""


def whole_pipeline(out: Path) -> str:
    """Which of the two pipelines lies there; every byte of it must be there."""
    kind = read_manifest(out).origin.name
    for name in SUBMODELS:
        for file in ("model.onnx", "model.onnx.data", "config.json"):
            assert (out / name / file).read_bytes() == kind.encode() * 50_000
    assert (out / "tokenizer" / "vocab.json").is_file()
    return kind


def wait_for_swaps(out: Path, count: int, limit_s: float = PATIENCE) -> tuple[bool, float]:
    """Wait until another pipeline lay under `out` `count` times; also the seconds from the last but one to the last."""
    begun = since = time.monotonic()
    last, taken = inode(out), 0.0
    while count and time.monotonic() < begun + limit_s:
        now = inode(out)
        if now not in (None, last):
            last, count = now, count - 1
            since, taken = time.monotonic(), time.monotonic() - since
        time.sleep(0.0005)
    return not count, taken


def inode(out: Path) -> int | None:
    try:
        return (out / "sdflow.json").stat().st_ino
    except FileNotFoundError:
        return None


def test_a_killed_assemble_leaves_the_old_or_the_new_pipeline(tmp_path: Path, companions: dict[str, Path]) -> None:
    parts = {kind: make_artifacts(tmp_path / kind, kind.encode(), size=50_000) for kind in "ab"}
    (tmp_path / "arguments").write_bytes(pickle.dumps((parts, companions)))
    script = tmp_path / "alternate.py"
    script.write_text(textwrap.dedent(ALTERNATE))
    moments = random.Random(1)
    found = set()
    for kills in range(40):
        process = subprocess.Popen([sys.executable, script, ROOT, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # The moment is counted in swaps that were seen, not in time, so that a slow machine changes nothing.
        seen, once = wait_for_swaps(tmp_path / "out", moments.randint(1, 3))
        assert seen, "no pipeline came"
        end = time.monotonic() + moments.uniform(0.0, 1.0) * once
        while time.monotonic() < end:
            assert (tmp_path / "out" / "sdflow.json").is_file(), "there is always a pipeline"
        process.kill()
        process.wait()
        process.stdout.close()
        found.add(whole_pipeline(tmp_path / "out"))
        if kills >= 19 and found == {"a", "b"}:
            break
    assert found == {"a", "b"}, "the kills must have hit at different moments"


def test_what_a_killed_assemble_left_is_removed_later(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]
) -> None:
    out = tmp_path / "pipelines" / "one"
    stale, fresh = (out.parent / f".one.{n}.sdflow-staging" for n in (1, 2))
    stale.mkdir(parents=True)
    (stale / "model_index.json").write_text("{}")
    with locked_folder(fresh):
        build(out, artifacts, companions)
        assert not stale.exists()
        assert fresh.exists(), "another process is filling it right now"


def test_a_write_that_fails_leaves_the_old_pipeline(
    tmp_path: Path, artifacts: dict[str, Artifact], companions: dict[str, Path]
) -> None:
    import resource

    out = tmp_path / "pipelines" / "one"
    build(out, artifacts, companions, copy=True)
    large = make_artifacts(tmp_path / "large", b"b", size=100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CacheError, match="cannot be written"):
            build(out, large, companions, copy=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (out / "unet" / "model.onnx").read_bytes() == b"a" * 1000
    assert [path.name for path in out.parent.iterdir()] == ["one"]
