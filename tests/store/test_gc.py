"""Garbage collection: least recently used first, and never what is in use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from until import until

from sdflow.artifact import Action
from sdflow.errors import CacheError
from sdflow.store import Cache

from .builds import assert_complete, build, contents, make_action, names, publish, write_files
from .faults import finish, in_process, start


def wait_for(path: Path) -> None:
    until(path.exists)


def use_at(cache: Cache, name: str, seconds_ago: float) -> None:
    digest = make_action(name).digest
    then = time.time() - seconds_ago
    os.utime(cache.root / "v1/actions" / digest[:2] / f"{digest}.json", (then, then))


def test_the_least_recently_used_goes_first(cache: Cache) -> None:
    for age, name in enumerate("abcd"):
        publish(cache, make_action(name))
        use_at(cache, name, 1000 - age)
    before = time.time()
    assert cache.lookup(make_action("a")) is not None  # used just now
    (entry,) = [entry for entry in cache.entries() if entry.action == make_action("a").digest]
    assert entry.last_used >= before - 1
    report = cache.gc(45_000)
    assert {entry.action for entry in report.removed} == {make_action("b").digest, make_action("c").digest}
    assert report.bytes_kept <= 45_000
    assert report.over == 0
    assert [cache.lookup(make_action(name)) is not None for name in "abcd"] == [True, False, False, True]
    assert names(cache.root / "v1/trash") == []


def test_without_a_limit_only_rubbish_goes(cache: Cache) -> None:
    kept = publish(cache, make_action("a"))
    publish(cache, make_action("b"))
    cache.forget(make_action("b"))
    report = cache.gc()
    assert (report.orphans, report.removed) == (1, ())
    assert cache.lookup(make_action("a")) == kept
    assert len(list((cache.root / "v1/objects").glob("*/*"))) == 1


def test_a_dry_run_says_what_would_go_and_removes_nothing(cache: Cache) -> None:
    publish(cache, make_action("a"))
    publish(cache, make_action("b"))
    cache.forget(make_action("b"))
    dry = cache.gc(0, dry_run=True)
    assert cache.lookup(make_action("a")) is not None
    assert len(list((cache.root / "v1/objects").glob("*/*"))) == 2
    real = cache.gc(0)
    assert (dry.removed[0].action, dry.orphans, dry.bytes_freed) == (real.removed[0].action, 1, real.bytes_freed)


def test_an_object_goes_only_when_all_its_actions_are_old(cache: Cache) -> None:
    for name in "ab":
        publish(cache, make_action(name), {"model.onnx": b"shared" * 1000})
    publish(cache, make_action("c"), {"model.onnx": b"other" * 1000})
    use_at(cache, "a", 1000)
    use_at(cache, "c", 500)
    assert [entry.action for entry in cache.gc(7000).removed] == [make_action("c").digest]
    assert {entry.action for entry in cache.gc(0).removed} == {make_action("a").digest, make_action("b").digest}


def test_a_structure_stays_longer_than_the_models_made_from_it(cache: Cache) -> None:
    structure = Action({**make_action("structure").content, "weights": "symbolic"})
    publish(cache, structure, {"model.onnx": b"graph" * 100})
    publish(cache, make_action("bound"), {"model.onnx": b"weights" * 1000})
    old = time.time() - 1000
    os.utime(cache.root / "v1/actions" / structure.digest[:2] / f"{structure.digest}.json", (old, old))
    assert [entry.action for entry in cache.gc(7000).removed] == [make_action("bound").digest]
    assert [(entry.action, entry.structure) for entry in cache.entries()] == [(structure.digest, True)]
    assert [entry.action for entry in cache.gc(0).removed] == [structure.digest]


def test_what_an_assembled_pipeline_uses_is_pinned(cache: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "pipelines" / "sd15"
    folder.mkdir(parents=True)
    old, new = publish(cache, make_action("old")), publish(cache, make_action("new"))
    assert cache.pin("sd15_cuda", [old.artifact.digest], folder)
    assert [entry.pinned_by for entry in cache.entries() if entry.object == old.artifact.digest] == [("sd15_cuda",)]
    report = cache.gc(0)
    assert [entry.action for entry in report.removed] == [make_action("new").digest]
    assert report.over > 0
    assert cache.lookup(old.action) == old

    again = publish(cache, make_action("new"))
    cache.pin("renamed", [again.artifact.digest], folder)  # the same folder, built anew
    assert new == again
    assert [entry.action for entry in cache.gc(0).removed] == [make_action("old").digest]

    folder.rmdir()
    assert [entry.action for entry in cache.gc(0).removed] == [make_action("new").digest]


def test_pins_of_two_folders_do_not_replace_each_other(cache: Cache, tmp_path: Path) -> None:
    records = [publish(cache, make_action(name)) for name in "ab"]
    for record, name in zip(records, "ab", strict=True):
        (tmp_path / name).mkdir()
        cache.pin("sd15/cuda", [record.artifact.digest], tmp_path / name)
    cache.gc(0)
    assert [cache.lookup(record.action) for record in records] == records


def test_what_is_not_there_cannot_be_pinned(cache: Cache) -> None:
    record = publish(cache, make_action())
    cache.gc(0)
    with pytest.raises(CacheError, match="not in the cache"):
        cache.pin("sd15", [record.artifact.digest])


def test_collection_during_a_build_leaves_what_it_uses(cache: Cache, tmp_path: Path) -> None:
    """Another process has looked up one step, is in the middle of the next, and published a third."""
    stop, ready = tmp_path / "stop", tmp_path / "ready"
    first, second, third = make_action("first"), make_action("second"), make_action("third")
    publish(cache, first)

    def run() -> None:
        mine = Cache(cache.root)
        with mine.lease():
            hit = mine.lookup(first)
            assert hit is not None
            published = publish(mine, third)
            mine.forget(third)  # an orphan, but in use
            with mine.staging(second) as staging:
                write_files(staging.files, contents(second))
                ready.touch()
                wait_for(stop)
                assert_complete(hit, contents(first))
                mine.check(published.artifact)
                assert staging.publish({}, {}).artifact.bytes

    child = start(run)
    wait_for(ready)
    for _ in range(3):
        report = cache.gc(0)
        assert (report.removed, report.orphans, report.rubbish) == ((), 0, 0)
    with pytest.raises(CacheError, match="in use by process"):
        cache.clean()
    stop.touch()
    assert finish(child)
    assert cache.lookup(second) is not None
    assert len(cache.gc(0).removed) == 2  # and now that it has ended, all of it may go


def test_a_build_without_a_lease_of_its_own_is_protected_while_it_publishes(cache: Cache) -> None:
    """Collecting without pause beside many publishing processes loses no entry that was published and not evicted."""

    def work(number: int) -> None:
        mine = Cache(cache.root)
        for step in range(15):
            record = publish(mine, make_action(f"{number}-{step}"), {"model.onnx": b"%d" % step})
            assert mine.lookup(record.action) == record

    children = [start(lambda number=number: work(number)) for number in range(3)]
    while any(psutil.Process(process).status() != psutil.STATUS_ZOMBIE for process, _ in children):
        report = cache.gc()
        assert report.removed == ()
    for child in children:
        assert finish(child)
    assert len(cache.entries()) == 45
    assert names(cache.root / "v1/quarantine") == []


def test_the_lease_of_a_dead_process_does_not_count(cache: Cache) -> None:
    record = publish(cache, make_action())

    def die() -> None:
        with cache.lease():
            assert cache.lookup(record.action) is not None
            os.kill(os.getpid(), 9)

    assert not in_process(die)
    assert len(names(cache.root / "v1/leases")) == 2
    assert len(cache.gc(0).removed) == 1
    assert names(cache.root / "v1/leases") == []


def test_staging_of_the_living_stays_and_of_the_dead_goes(cache: Cache) -> None:
    def die() -> None:
        with cache.staging(make_action("dead")) as staging:
            write_files(staging.files, contents(make_action("dead")))
            os.kill(os.getpid(), 9)

    assert not in_process(die)
    with cache.staging(make_action("alive")) as staging:
        write_files(staging.files, contents(make_action("alive")))
        assert cache.gc().rubbish == 1
        assert staging.publish({}, {})
    assert cache.lookup(make_action("alive")) is not None
    assert names(cache.root / "v1/staging") == []


@pytest.mark.parametrize("days", [1, 30])
def test_quarantine_and_kept_failures_stay_two_weeks(cache: Cache, days: int) -> None:
    record = publish(cache, make_action())
    record.artifact.path.parent.chmod(0o755)
    (record.artifact.path.parent / "manifest.json").unlink()
    assert cache.lookup(record.action) is None
    with pytest.raises(RuntimeError), cache.staging(make_action(), keep_failed=True):
        raise RuntimeError
    then = time.time() - days * 86400
    for folder in ("quarantine", "staging"):
        for path in (cache.root / "v1" / folder).iterdir():
            os.utime(path, (then, then))
    cache.gc()
    left = len(names(cache.root / "v1/quarantine")) + len(names(cache.root / "v1/staging"))
    assert left == (2 if days == 1 else 0)


def test_clean_empties_the_cache_and_it_works_again(cache: Cache, tmp_path: Path) -> None:
    record = publish(cache, make_action())
    cache.pin("sd15", [record.artifact.digest], tmp_path)
    cache.notes.remember_step("sd15/unet/0", record.action)
    cache.clean()
    assert cache.lookup(record.action) is None
    assert cache.notes.last_action("sd15/unet/0") is None
    left = [path.relative_to(cache.root).as_posix() for path in cache.root.rglob("*") if path.is_file()]
    assert sorted(path for path in left if not path.startswith("v1/locks")) == [".gitignore", "CACHEDIR.TAG"]
    assert build(cache, record.action) == record


def _no_tag(root: Path) -> None:
    (root / "CACHEDIR.TAG").unlink()


def _tag_of_another_program(root: Path) -> None:
    (root / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n# Created by another program\n")


@pytest.mark.parametrize("harm", [_no_tag, _tag_of_another_program])
def test_clean_refuses_a_folder_that_is_not_ours(cache: Cache, harm: Callable[[Path], None]) -> None:
    record = publish(cache, make_action())
    harm(cache.root)
    with pytest.raises(CacheError, match=r"CACHEDIR\.TAG"):
        cache.clean()
    assert cache.gc(0).removed == ()
    assert_complete(record, contents(record.action))
