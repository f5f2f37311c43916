"""A read-only cache serves hits; only what must be written fails, and says what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sdflow.report  # noqa: F401  (children that gave up root cannot import any more)
from sdflow.cli import cache as cache_command
from sdflow.errors import CacheError
from sdflow.store import Cache
from sdflow.store.layout import remove_tree

from .builds import assert_complete, contents, make_action, overwrite, publish
from .faults import in_process, ordinary_user, read_only


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that other users can reach."""
    folder = Path(tempfile.mkdtemp(prefix="sdflow-test-"))
    folder.chmod(0o755)
    yield folder
    remove_tree(folder)


@pytest.fixture
def filled(open_path: Path) -> Cache:
    cache = Cache(open_path / "cache")
    publish(cache, make_action())
    cache.notes.remember_step("sd15/unet/0", make_action())
    cache.stat.close()
    return cache


def _mounted(cache: Cache) -> None:
    read_only(cache.root)


def _by_permission(cache: Cache) -> None:
    for folder in (cache.root, *(path for path in cache.root.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    ordinary_user()


@pytest.fixture(params=[_mounted, _by_permission], ids=["mount", "permissions"])
def bar(request: pytest.FixtureRequest) -> Callable[[Cache], None]:
    return request.param  # type: ignore[no-any-return]


def test_a_read_only_cache_serves_hits(filled: Cache, bar: Callable[[Cache], None]) -> None:
    def run() -> None:
        bar(filled)
        cache = Cache(filled.root)
        with pytest.raises(OSError):  # it is read-only indeed
            (cache.root / "probe").touch()
        with cache.lease():
            record = cache.lookup(make_action())
            assert record is not None
            assert_complete(record, contents(make_action()))
            cache.check(record.artifact)
        assert cache.notes.last_action("sd15/unet/0") == make_action()
        cache.notes.remember_step("sd15/unet/0", make_action("other"))
        assert cache.pin("sd15", [record.artifact.digest]) is False
        assert len(cache.entries()) == 1
        assert cache.verify().damaged == ()

    assert in_process(run)


def test_a_read_only_cache_that_was_copied_serves_hits(filled: Cache, bar: Callable[[Cache], None]) -> None:
    """Its stat cache knows none of the files, and cannot learn."""
    (filled.root / "v1/stat.sqlite").unlink()

    def run() -> None:
        bar(filled)
        cache = Cache(filled.root)
        assert cache.lookup(make_action()) is not None
        assert cache.stat.digest(filled.root / "CACHEDIR.TAG") == cache.stat.digest(filled.root / "CACHEDIR.TAG")

    assert in_process(run)


@pytest.mark.parametrize(
    "write",
    [
        lambda cache: publish(cache, make_action("new")),
        lambda cache: cache.lock(make_action("new")).__enter__(),
        lambda cache: cache.forget(make_action()),
        lambda cache: cache.gc(0),
        lambda cache: cache.clean(),
    ],
    ids=["publish", "lock", "forget", "gc", "clean"],
)
def test_writing_to_a_read_only_cache_says_what_to_do(
    filled: Cache, bar: Callable[[Cache], None], write: Callable[[Cache], object]
) -> None:
    def run() -> None:
        bar(filled)
        with pytest.raises(CacheError, match="cannot be written") as caught:
            write(Cache(filled.root))
        assert "another cache folder" in str(caught.value)

    assert in_process(run)
    assert filled.lookup(make_action()) is not None


def test_damage_in_a_read_only_cache_is_a_miss(filled: Cache, bar: Callable[[Cache], None]) -> None:
    record = filled.lookup(make_action())
    assert record is not None
    path = record.artifact.path / "model.onnx"
    overwrite(path, bytes(path.stat().st_size))

    def run() -> None:
        bar(filled)
        cache = Cache(filled.root)
        assert cache.lookup(make_action()) is None
        assert cache.lookup(make_action()) is None
        assert len(cache.verify().damaged) == 1

    assert in_process(run)


def test_a_cache_that_may_not_be_read_says_so(filled: Cache) -> None:
    """Silence would mean to build everything again."""
    (filled.root / "v1/actions").chmod(0o000)

    def run() -> None:
        ordinary_user()
        with pytest.raises(CacheError, match="cannot be read"):
            Cache(filled.root).lookup(make_action())

    assert in_process(run)
    (filled.root / "v1/actions").chmod(0o755)


def test_an_ordinary_user_can_build_quarantine_collect_and_clean(open_path: Path) -> None:
    """Sealed folders are no obstacle to their owner, as they are none to root."""
    open_path.chmod(0o777)

    def run() -> None:
        ordinary_user()
        cache = Cache(open_path / "mine")
        record = publish(cache, make_action("a"))
        publish(cache, make_action("b"))
        path = record.artifact.path / "model.onnx"
        path.chmod(0o644)
        path.write_bytes(b"damaged")
        assert cache.lookup(record.action) is None
        assert publish(cache, make_action("a")) == record
        with pytest.raises(RuntimeError), cache.staging(make_action("c"), keep_failed=True) as staging:
            (staging.files / "model.onnx").touch()
            staging.tree_digest()
            raise RuntimeError
        assert Path(f"{staging.path}-failed").exists()
        assert len(cache.gc(20_000).removed) == 2
        publish(cache, make_action("a"))
        cache.clean()
        assert cache.entries() == []

    assert in_process(run)


def test_a_read_only_cache_tells_what_a_collection_would_remove(filled: Cache, bar: Callable[[Cache], None]) -> None:
    def run() -> None:
        bar(filled)
        report = Cache(filled.root).gc(0, dry_run=True)
        assert len(report.removed) == 1

    assert in_process(run)
    assert filled.lookup(make_action()) is not None


def test_verify_of_a_read_only_cache_says_that_damage_cannot_be_moved(
    filled: Cache, bar: Callable[[Cache], None], capsys: pytest.CaptureFixture[str]
) -> None:
    record = filled.lookup(make_action())
    assert record is not None
    path = record.artifact.path / "model.onnx"
    overwrite(path, bytes(path.stat().st_size))

    def run() -> None:
        bar(filled)
        report = Cache(filled.root).verify()
        assert len(report.damaged) == len(report.stuck) == 1
        with pytest.raises(CacheError, match="1 of them cannot be moved") as caught:
            cache_command.verify(filled.root)
        assert "were moved" not in str(caught.value)

    assert in_process(run)
