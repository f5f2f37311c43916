"""What a pipeline folder links to stays, whatever is killed, full, moved, renamed or run at once: `gc` never breaks one."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from sampled import sampled

from sdflow.artifact import Artifact, Record
from sdflow.build.assemble import assemble
from sdflow.digest import digest_file
from sdflow.disk.atomic_write import UNFINISHED
from sdflow.errors import CacheError
from sdflow.manifest import Origin
from sdflow.store import Cache
from sdflow.store.layout import remove_tree

from .builds import contents, make_action, publish, write_files
from .faults import finish, in_process, killed_before_file_event, small_disk, start

SUBMODELS = ("text_encoder", "unet")


@pytest.fixture
def project(memory_path: Path) -> Path:
    """A folder for a cache and pipelines, and a checkpoint beside it."""
    write_files(memory_path / "checkpoint", {"scheduler/scheduler_config.json": b'{"_class_name": "DDIMScheduler"}'})
    (memory_path / "project").mkdir()
    return memory_path / "project"


def build(
    project: Path, name: str, out: str = "pipelines/one", *, copy: bool = False, cache: Path | None = None
) -> Path:
    """A pipeline of two artifacts that this name gives, as a run makes it."""
    store, folder = Cache(cache or project / "cache"), project / out
    with store.lease():
        parts = {}
        for submodel in SUBMODELS:
            action = make_action(f"{name}-{submodel}")
            record: Record = store.lookup(action) or publish(store, action)
            parts[submodel] = record.artifact
        put_together(folder, parts, project, store, copy=copy, name=name)
    store.stat.close()
    return folder


def put_together(
    folder: Path, parts: dict[str, Artifact], project: Path, store: Cache, *, copy: bool = False, name: str = "one"
) -> bool:
    companions = {"scheduler": project.parent / "checkpoint/scheduler"}
    return assemble(
        folder,
        parts=parts,
        companions=companions,
        origin=Origin(name, "cpu"),
        copy=copy,
        keeper=store,
        digests=store.stat,
    ).changed


def assert_whole(folder: Path, names: Iterable[str]) -> None:
    """The folder is a pipeline of one of these names, with all its files."""
    name = json.loads((folder / "sdflow.json").read_text())["name"]
    assert name in names
    for submodel in SUBMODELS:
        for file, content in contents(make_action(f"{name}-{submodel}")).items():
            assert (folder / submodel / file).read_bytes() == content, f"{name}: {submodel}/{file}"
    assert (folder / "scheduler/scheduler_config.json").is_file()


@pytest.mark.parametrize("further", [16, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every one"])
@pytest.mark.parametrize(("before", "copy"), sampled([("old", False), (None, True), (None, False), ("old", True)]))
def test_killed_before_any_operation_gc_breaks_no_pipeline_and_leaves_nothing(
    project: Path, before: str | None, copy: bool, further: int
) -> None:
    """Of an assembly: before, between and after the exchange of the folders and the pin.

    One to `further` operations further each time: which ones differs from run to run, and with -m slow it is every one.
    """
    build(project, "new", "elsewhere/new")
    operation, kills, ended = 0, 0, False
    while not ended:
        remove_tree(project / "pipelines")
        if before:
            build(project, before, copy=copy)
        ended = killed_before_file_event(operation, lambda: build(project, "new", copy=copy))
        kills += 1
        operation += random.randint(1, further)
        Cache(project / "cache").gc(0)
        folder = project / "pipelines/one"
        assert folder.exists() or not before, "an old pipeline is never lost"
        if folder.exists():
            assert_whole(folder, ["new", before] if not ended else ["new"])
        hidden = [path.name for path in project.glob("pipelines/.*") if not path.name.endswith(".making")]
        assert hidden == []
    assert kills > 60 // further
    left = [path.name for path in (project / "cache/v1/staging").iterdir()]
    assert [name for name in left if not name.endswith(UNFINISHED)] == []  # young ones stay


def test_a_full_disk_at_the_pin_is_an_error_and_the_old_pipeline_stays(project: Path) -> None:
    (project / "cache").mkdir()

    def run() -> None:
        if small_disk(project / "cache", 1_000_000) != "tmpfs":
            return  # this process may not mount anything
        build(project, "old")
        store = Cache(project / "cache")
        parts = {submodel: publish(store, make_action(f"new-{submodel}")).artifact for submodel in SUBMODELS}
        store.note_output_folder(project / "pipelines")
        with (project / "cache/full").open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
            while True:
                stream.write(bytes(512))
        with pytest.raises(CacheError, match="the disk is full"):
            put_together(project / "pipelines/one", parts, project, store, name="new")
        assert_whole(project / "pipelines/one", ["old"])
        (project / "cache/full").unlink()
        store.gc(0)
        assert_whole(project / "pipelines/one", ["old"])

    assert in_process(run)


def _project_moved(project: Path, folder: Path) -> tuple[Path, Path]:
    moved = project.rename(project.with_name("moved"))
    return moved / "cache", moved / folder.relative_to(project)


def _renamed(project: Path, folder: Path) -> tuple[Path, Path]:
    return project / "cache", folder.rename(folder.with_name("another name"))


def _moved_away(project: Path, folder: Path) -> tuple[Path, Path]:
    (project.parent / "far/away").mkdir(parents=True)
    return project / "cache", folder.rename(project.parent / "far/away/one")


def _copied_beside(project: Path, folder: Path) -> tuple[Path, Path]:
    return project / "cache", Path(shutil.copytree(folder, folder.with_name("copy"), symlinks=True))


def _without_a_pin(project: Path, folder: Path) -> tuple[Path, Path]:
    """As a run of an earlier sdflow left it that was killed before its pin."""
    shutil.rmtree(project / "cache/v1/pins")
    return project / "cache", folder


@pytest.mark.parametrize("move", [_project_moved, _renamed, _moved_away, _copied_beside, _without_a_pin])
def test_a_pipeline_that_was_moved_stays_whole(
    project: Path, move: Callable[[Path, Path], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if move is _moved_away:
        monkeypatch.setenv("HOME", str(project))  # all that cache and pipelines share: the links are absolute
    cache, folder = move(project, build(project, "one"))
    for _ in range(2):
        Cache(cache).gc(0)
        assert_whole(folder, ["one"])
    shutil.rmtree(folder)
    if move is _copied_beside:
        shutil.rmtree(folder.with_name("one"))
    Cache(cache).gc(0)
    assert Cache(cache).entries() == [], "and with the folder its pin goes"
    assert [path.name for path in (cache / "v1/pins").iterdir()] == []


def test_a_pipeline_that_was_built_in_the_place_of_a_moved_one_takes_no_pin_away(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project))
    _, moved = _moved_away(project, build(project, "one"))
    build(project, "two")
    Cache(project / "cache").gc(0)
    assert_whole(moved, ["one"])
    assert_whole(project / "pipelines/one", ["two"])


def test_a_pin_of_another_run_takes_none_away(project: Path) -> None:
    """Two runs into one folder: the one whose pipeline was replaced at once writes its pin last."""
    folder = build(project, "first")
    first = json.loads((folder / "sdflow.json").read_text())
    kept = Path(shutil.copytree(folder, project.parent / "kept", symlinks=True))
    build(project, "second")
    store = Cache(project / "cache")
    digests = [store.lookup(make_action(f"first-{name}")).artifact.digest for name in SUBMODELS]  # type: ignore[union-attr]
    store.pin(first["name"], digests, folder, kept)
    store.gc(0)
    assert_whole(folder, ["second"])


def test_a_pipeline_replaced_by_a_copy_lets_its_artifacts_go(project: Path) -> None:
    folder = build(project, "one")
    build(project, "one", copy=True)
    Cache(project / "cache").gc(0)
    assert Cache(project / "cache").entries() == []
    assert_whole(folder, ["one"])


def test_a_current_folder_whose_pin_is_gone_is_pinned_again(project: Path) -> None:
    build(project, "one")
    remove_tree(project / "cache/v1/pins")
    build(project, "one")
    assert len(list((project / "cache/v1/pins").glob("*.json"))) == 1


def test_what_an_earlier_sdflow_pinned_stays(project: Path) -> None:
    folder = build(project, "one", out="far/one")
    pins, outputs = project / "cache/v1/pins", project / "cache/v1/outputs"
    (path,) = pins.glob("*.json")
    body = json.loads(path.read_text())["record"]
    old = {"format": 1, **{key: body[key] for key in ("name", "folder", "objects")}}
    from sdflow.store.records import dump

    remove_tree(pins)
    remove_tree(outputs)
    pins.mkdir()
    (pins / "one-0123456789abcdef.json").write_bytes(dump(old))
    Cache(project / "cache").gc(0)
    assert_whole(folder, ["one"])


def test_a_copying_and_a_linking_run_into_one_folder_do_not_disturb_each_other(project: Path) -> None:
    build(project, "one")

    def work(name: str, copy: bool) -> None:
        for _ in range(25):
            build(project, name, copy=copy)

    for child in [
        start(lambda: work("one", True)),
        start(lambda: work("one", False)),
        start(lambda: work("two", False)),
    ]:
        assert finish(child)
    Cache(project / "cache").gc(0)
    assert_whole(project / "pipelines/one", ["one", "two"])
    assert list(project.glob("pipelines/.*")) == []


def test_what_a_killed_copy_left_goes_though_the_folder_is_current(project: Path) -> None:
    folder = build(project, "one", copy=True)
    left = folder.parent / ".one.0123.sdflow-staging"
    write_files(left, {"unet/model.onnx.data": bytes(1000)})
    build(project, "one", copy=True)
    assert not left.exists()
    write_files(left, {"unet/model.onnx.data": bytes(1000)})
    assert Cache(project / "cache").gc().rubbish == 1
    assert not left.exists()


# Power


@pytest.mark.parametrize("copy", [False, True], ids=["links", "copies"])
def test_everything_is_on_the_disk_before_the_exchange_and_the_exchange_before_the_old_one_goes(
    project: Path, copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdflow.build import assemble as module

    folder = build(project, "old", copy=copy)
    synced: list[tuple[int, int]] = []
    exchanged: list[int] = []
    sync, swap, remove = os.fsync, module.swap, shutil.rmtree

    def note(descriptor: int) -> None:
        sync(descriptor)
        found = os.fstat(descriptor)
        synced.append((found.st_dev, found.st_ino))

    def look(staging: Path, out: Path) -> None:
        for path in (staging, *staging.rglob("*")):
            if not path.is_symlink():
                assert (path.stat().st_dev, path.stat().st_ino) in synced, f"{path} is not on the disk"
        swap(staging, out)
        exchanged.append(len(synced))

    def removed(path: Path, *arguments: object, **options: object) -> None:
        if exchanged and Path(path).exists():
            parent = folder.parent.stat()
            assert (parent.st_dev, parent.st_ino) in synced[exchanged[0] :], "the exchange is not on the disk"
        remove(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(module, "swap", look)
    monkeypatch.setattr(shutil, "rmtree", removed)
    build(project, "new", copy=copy)
    assert len(exchanged) == 1
    assert_whole(folder, ["new"])


# Damage


def _shorten(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b'{"_a":1')


def _flip(path: Path) -> None:
    before = path.stat()
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("copy", "name", "harm"),
    [
        (False, "scheduler/scheduler_config.json", _shorten),
        (False, "scheduler/scheduler_config.json", _flip),
        (False, "model_index.json", _flip),
        (True, "scheduler/scheduler_config.json", _shorten),
        (True, "unet/model.onnx.data", _flip),
        (True, "unet/config.json", _flip),
    ],
)
def test_a_damaged_pipeline_is_not_current_and_is_mended(
    project: Path, copy: bool, name: str, harm: Callable[[Path], None]
) -> None:
    folder = build(project, "one", copy=copy)
    before = digest_file(folder / name)
    harm(folder / name)
    build(project, "one", copy=copy)
    assert digest_file(folder / name) == before
    assert_whole(folder, ["one"])


def test_a_link_that_leads_elsewhere_is_not_current(project: Path) -> None:
    folder = build(project, "one")
    (folder / "unet").unlink()
    (folder / "unet").symlink_to(folder / "text_encoder", target_is_directory=True)
    build(project, "one")
    assert_whole(folder, ["one"])
