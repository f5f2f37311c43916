"""What a build leaves in the cache, and what it does not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sdflow.artifact import Action
from sdflow.errors import CacheError, PassError, UsageError
from sdflow.store import Cache, CorruptArtifactError

from .builds import assert_complete, build, contents, make_action, names, publish, write_files
from .faults import in_process


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        Cache(tmp_path / "file")


def test_a_hit_is_what_was_published(cache: Cache) -> None:
    action = make_action()
    published = publish(cache, action)
    found = Cache(cache.root).lookup(action)
    assert found == published
    assert found.facts == {"nodes": 3}
    assert found.built == {"seconds": 0.5}
    assert_complete(found, contents(action))
    cache.check(found.artifact)


def test_opening_and_looking_up_create_nothing(cache: Cache) -> None:
    assert cache.lookup(make_action()) is None
    assert cache.notes.last_action("sd15/unet/0") is None
    assert cache.entries() == []
    assert cache.verify().objects == 0
    assert cache.gc(0).removed == ()
    cache.clean()
    assert not cache.root.exists()


def test_the_cache_is_tagged_and_ignored_by_git(cache: Cache) -> None:
    publish(cache, make_action())
    assert (cache.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert (cache.root / ".gitignore").read_text() == "*\n"


def test_a_folder_with_other_things_is_not_taken_as_a_cache(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CacheError, match=r"thesis\.tex"):
        publish(Cache(tmp_path), make_action())
    assert names(tmp_path) == ["thesis.tex"]


def test_objects_are_real_read_only_files_with_one_link(cache: Cache) -> None:
    record = publish(cache, make_action())
    folder = record.artifact.path.parent
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        if path.is_dir():
            assert stat.S_IMODE(found.st_mode) == 0o555
        else:
            assert stat.S_ISREG(found.st_mode)
            assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o444, 1)


def test_two_actions_with_the_same_output_share_an_object(cache: Cache) -> None:
    first = publish(cache, make_action("a"), {"model.onnx": b"same"})
    second = publish(cache, make_action("b"), {"model.onnx": b"same"})
    assert first.artifact == second.artifact
    assert first.action != second.action
    assert len(list((cache.root / "v1/objects").glob("*/*"))) == 1
    assert names(cache.root / "v1/staging") == []


@pytest.mark.parametrize("fault", [RuntimeError("the pass failed"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_is_never_cached(cache: Cache, fault: BaseException) -> None:
    action = make_action()
    with pytest.raises(type(fault)), cache.staging(action) as staging:
        write_files(staging.files, contents(action))
        raise fault
    assert cache.lookup(action) is None
    assert names(cache.root / "v1/staging") == names(cache.root / "v1/trash") == names(cache.root / "v1/leases") == []


def test_a_build_that_is_not_published_is_not_cached(cache: Cache) -> None:
    with cache.staging(make_action()) as staging:
        write_files(staging.files, contents(make_action()))
    assert cache.lookup(make_action()) is None
    assert names(cache.root / "v1/staging") == []


def test_a_failure_can_be_kept_for_a_look(cache: Cache) -> None:
    action = make_action()
    with pytest.raises(RuntimeError), cache.staging(action, keep_failed=True) as staging:
        write_files(staging.files, contents(action))
        raise RuntimeError
    kept = Path(f"{staging.path}-failed")
    assert (kept / "files/model.onnx").read_bytes() == contents(action)["model.onnx"]
    cache.gc()
    assert kept.exists()
    assert cache.lookup(action) is None


def test_facts_that_are_no_json_fail_before_anything_is_published(cache: Cache) -> None:
    for facts in ({"path": Path()}, {"difference": float("nan")}):
        with pytest.raises((TypeError, ValueError)), cache.staging(make_action()) as staging:
            write_files(staging.files, contents(make_action()))
            staging.publish(facts, {})
    assert list((cache.root / "v1/objects").glob("*/*")) == []


def _symlink(files: Path) -> None:
    (files / "weights").symlink_to("model.onnx")


def _linked_folder(files: Path) -> None:
    (files / "weights").symlink_to("extra", target_is_directory=True)


def _hardlink(files: Path) -> None:
    (files / "weights").hardlink_to(files / "model.onnx")


def _device(files: Path) -> None:
    os.mkfifo(files / "weights")


@pytest.mark.parametrize("make", [_symlink, _linked_folder, _hardlink, _device])
def test_only_real_files_are_published(cache: Cache, make: object) -> None:
    with pytest.raises(PassError, match="cannot be cached"), cache.staging(make_action()) as staging:
        write_files(staging.files, contents(make_action()))
        make(staging.files)  # type: ignore[operator]
        staging.publish({}, {})
    assert cache.lookup(make_action()) is None


def test_an_empty_result_is_not_published(cache: Cache) -> None:
    with pytest.raises(PassError, match="no file"), cache.staging(make_action()) as staging:
        staging.publish({}, {})
    assert cache.lookup(make_action()) is None


def test_a_rebuild_can_be_compared_without_publishing(cache: Cache) -> None:
    record = publish(cache, make_action())
    with cache.staging(make_action()) as staging:
        write_files(staging.files, contents(make_action()))
        assert staging.tree_digest() == record.artifact.digest
    with cache.staging(make_action()) as staging:
        write_files(staging.files, contents(make_action()) | {"model.onnx": b"other"})
        assert staging.tree_digest() != record.artifact.digest


def test_forgetting_touches_only_the_actions_named(cache: Cache) -> None:
    publish(cache, make_action("a"))
    kept = publish(cache, make_action("b"))
    cache.forget(make_action("a"))
    cache.forget(make_action("never built"))
    assert cache.lookup(make_action("a")) is None
    assert cache.lookup(make_action("b")) == kept
    rebuilt = build(cache, make_action("a"))
    assert cache.lookup(make_action("a")) == rebuilt


def test_a_rebuild_after_forgetting_replaces_the_result(cache: Cache) -> None:
    publish(cache, make_action(), {"model.onnx": b"old"})
    cache.forget(make_action())
    new = publish(cache, make_action(), {"model.onnx": b"new"})
    assert cache.lookup(make_action()) == new


def test_a_hit_does_not_read_the_weights_again(cache: Cache) -> None:
    """Nor just after publishing, nor in a new process."""
    action = make_action()
    files = {f"part{number}.data": os.urandom(2_000_000) for number in range(5)}
    publish(cache, action, files)

    def look() -> None:
        reader = Cache(cache.root)
        reader.lookup(action)
        before = _bytes_read()
        for _ in range(30):
            assert Cache(cache.root).lookup(action) is not None
        assert _bytes_read() - before < 30 * 200_000

    assert in_process(look)


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_the_cache_can_be_moved_and_still_does_not_read_the_weights(cache: Cache, tmp_path: Path) -> None:
    action = make_action()
    publish(cache, action, {"model.onnx.data": os.urandom(5_000_000)})
    cache.stat.close()
    cache.root.rename(tmp_path / "elsewhere")
    moved = Cache(tmp_path / "elsewhere")
    moved.lookup(make_action("other"))
    before = _bytes_read()
    assert moved.lookup(action) is not None
    assert _bytes_read() - before < 1_000_000


def test_a_collected_artifact_is_not_taken_for_sound(cache: Cache) -> None:
    record = publish(cache, make_action())
    cache.gc(0)
    with pytest.raises(CorruptArtifactError, match="no object"):
        cache.check(record.artifact)
    assert cache.lookup(make_action()) is None


def test_the_last_action_of_a_step_is_remembered(cache: Cache) -> None:
    old, new = make_action("a"), make_action("b")
    cache.notes.remember_step("sd15_cuda/unet/2", old)
    cache.notes.remember_step("sd15_cuda/unet/3", new)
    assert Cache(cache.root).notes.last_action("sd15_cuda/unet/2") == old
    cache.notes.remember_step("sd15_cuda/unet/2", new)
    assert cache.notes.last_action("sd15_cuda/unet/2") == new
    for path in (cache.root / "v1/steps").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    assert cache.notes.last_action("sd15_cuda/unet/2") is None
    cache.notes.remember_step("sd15_cuda/unet/2", old)
    assert cache.notes.last_action("sd15_cuda/unet/2") == old


def test_an_action_without_pass_or_submodel_is_listed(cache: Cache) -> None:
    publish(cache, Action({"merge": 1}), {"recipes.json": b"{}"})
    assert [(entry.pass_name, entry.submodel) for entry in cache.entries()] == [("?", "?")]
