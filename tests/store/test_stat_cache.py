"""Digests by stat: right whatever happens to the file, and quick when nothing did."""

from __future__ import annotations

import mmap
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sdflow.digest import digest_file
from sdflow.errors import CacheError
from sdflow.store import Cache, stat_cache

from .builds import make_action, publish
from .faults import finish, in_process, start

SETTLED_NS = stat_cache.COARSEST_NS
"""As on a kernel that puts off no file's time: nobody writes through a map here, and no test need wait half a minute."""


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stat_cache, "SETTLED_NS", SETTLED_NS)
        yield


@pytest.fixture(scope="module")
def old_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders with a file each that has been left alone for long enough to be believed: one wait for all tests."""
    folders = [tmp_path_factory.mktemp("old") for _ in range(20)]
    for folder in folders:
        (folder / "weights.safetensors").write_bytes(os.urandom(100_000))
    time.sleep(SETTLED_NS / 1e9 + 0.05)
    return iter(folders)


@pytest.fixture
def old_file(old_files: Iterator[Path]) -> Path:
    return next(old_files) / "weights.safetensors"


class Counted:
    """digest_file, counting how often it reads."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: Path) -> str:
        self.calls += 1
        return digest_file(path)


def test_a_file_that_does_not_change_is_read_once(cache: Cache, old_file: Path) -> None:
    count = Counted()
    assert cache.stat.value(old_file, "unet tensors", count) == digest_file(old_file)
    assert cache.stat.value(old_file, "unet tensors", count) == digest_file(old_file)
    assert Cache(cache.root).stat.value(old_file, "unet tensors", count) == digest_file(old_file)
    assert count.calls == 1
    assert cache.stat.value(old_file, "vae tensors", lambda path: "another value of the same file") != digest_file(
        old_file
    )
    assert cache.stat.digest(old_file) == digest_file(old_file)


def test_touching_and_renaming_change_no_digest_and_cost_one_read(cache: Cache, old_file: Path) -> None:
    count = Counted()
    digest = cache.stat.value(old_file, "x", count)
    os.utime(old_file)
    assert cache.stat.value(old_file, "x", count) == digest
    renamed = old_file.rename(old_file.with_name("renamed.safetensors"))
    assert cache.stat.value(renamed, "x", count) == digest
    assert count.calls == 3
    assert cache.stat.digest(renamed) == digest


def test_a_change_with_restored_mtime_is_seen(cache: Cache, old_file: Path) -> None:
    digest, before = cache.stat.digest(old_file), old_file.stat()
    data = bytearray(old_file.read_bytes())
    data[500] ^= 1
    with old_file.open("r+b") as stream:
        stream.write(data)
    os.utime(old_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = old_file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert cache.stat.digest(old_file) == digest_file(old_file) != digest


def test_another_file_moved_into_the_place_is_seen(cache: Cache, old_file: Path, tmp_path: Path) -> None:
    cache.stat.digest(old_file)
    other = tmp_path / "other"
    other.write_bytes(os.urandom(100_000))
    os.utime(other, ns=(old_file.stat().st_atime_ns, old_file.stat().st_mtime_ns))
    other.replace(old_file)
    assert cache.stat.digest(old_file) == digest_file(old_file)


def test_a_file_that_changes_within_one_tick_is_never_mistaken(cache: Cache, tmp_path: Path) -> None:
    """Many same-length changes as quick as can be: each is seen, though stats are often equal."""
    path = tmp_path / "busy"
    equal = 0
    for number in range(500):
        before = path.stat() if number else None
        with path.open("r+b" if number else "wb") as stream:
            stream.write(b"%08d" % number)
        equal += before is not None and path.stat().st_mtime_ns == before.st_mtime_ns
        assert cache.stat.digest(path) == digest_file(path)
    print(f"{equal} of 500 changes did not show in mtime")


def test_a_young_file_is_not_believed_by_its_stat(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stat_cache, "SETTLED_NS", 3600 * 10**9)  # it is young for as long as this test takes
    path = tmp_path / "young"
    path.write_bytes(b"now")
    count = Counted()
    cache.stat.value(path, "x", count)
    cache.stat.value(path, "x", count)
    assert count.calls == 2


def test_a_file_stays_young_for_as_long_as_the_kernel_may_delay_its_time() -> None:
    """The true figure, which the other tests replace: dirty pages are looked at that late."""
    hundredths = [
        int(Path("/proc/sys/vm", name).read_text()) for name in ("dirty_expire_centisecs", "dirty_writeback_centisecs")
    ]
    assert stat_cache._settled_ns() >= sum(hundredths) * 10_000_000 + stat_cache.COARSEST_NS


def test_a_write_through_a_map_that_keeps_the_time_is_not_believed(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write to a page renews the time, the next one does not: the file is young by then."""
    monkeypatch.setattr(stat_cache, "SETTLED_NS", stat_cache._settled_ns())
    path = tmp_path / "mapped"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
        view[0] = 1
        first = cache.stat.digest(path)
        before = path.stat()
        time.sleep(0.05)
        view[1] = 1
        after = path.stat()
        print("time renewed" if after.st_ctime_ns != before.st_ctime_ns else "time kept")
        assert cache.stat.digest(path) == digest_file(path) != first


def test_rehash_believes_nothing_that_was_noted(cache: Cache, old_file: Path) -> None:
    count = Counted()
    cache.stat.value(old_file, "x", count)
    again = Cache(cache.root, rehash=True)
    for _ in range(2):
        again.stat.value(old_file, "x", count)
    assert count.calls == 2, "once more, and then it is known"
    Cache(cache.root).stat.value(old_file, "x", count)
    assert count.calls == 2


def test_a_file_that_keeps_changing_is_an_error(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(b"")

    def read_and_grow(place: Path) -> str:
        with place.open("ab") as stream:
            stream.write(b"more")
        return digest_file(place)

    with pytest.raises(CacheError, match="changed while it was read"):
        cache.stat.value(path, "x", read_and_grow)


def test_a_missing_file_and_a_failing_computation_raise(cache: Cache, old_file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cache.stat.digest(old_file.with_name("missing"))

    def fail(path: Path) -> str:
        raise ValueError("no safetensors header")

    with pytest.raises(ValueError, match="no safetensors header"):
        cache.stat.value(old_file, "x", fail)
    assert cache.stat.digest(old_file) == digest_file(old_file)


def _garbage(database: Path) -> None:
    database.write_bytes(os.urandom(20_000))


def _cut(database: Path) -> None:
    database.write_bytes(database.read_bytes()[:5000])


def _zeroed_page(database: Path) -> None:
    data = bytearray(database.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    database.write_bytes(data)


def _empty(database: Path) -> None:
    database.write_bytes(b"")


def _other_schema(database: Path) -> None:
    database.unlink()
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE stat (something TEXT)")
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize("harm", [_garbage, _cut, _zeroed_page, _empty, _other_schema])
def test_a_corrupt_database_is_made_anew(cache: Cache, old_file: Path, harm: Callable[[Path], None]) -> None:
    record = publish(cache, make_action())
    cache.stat.digest(old_file)
    cache.stat.close()
    harm(cache.root / "v1/stat.sqlite")
    again = Cache(cache.root)
    count = Counted()
    assert again.stat.value(old_file, "sha256", count) == digest_file(old_file)
    assert again.lookup(record.action) == record
    assert Cache(cache.root).stat.value(old_file, "sha256", count) == digest_file(old_file)
    assert count.calls == 1


def test_many_processes_share_the_database(cache: Cache, old_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = old_file.parent
    monkeypatch.setattr(stat_cache, "SETTLED_NS", -(10**9))  # files of this moment are kept, too

    def work(number: int) -> None:
        mine = Cache(cache.root)
        for step in range(40):
            path = folder / f"{number}-{step}"
            path.write_bytes(b"%d" % step)
            assert mine.stat.value(path, "x", digest_file) == digest_file(path)
            assert mine.stat.digest(old_file) == digest_file(old_file)

    for child in [start(lambda number=number: work(number)) for number in range(4)]:
        assert finish(child)
    with sqlite3.connect(cache.root / "v1/stat.sqlite") as database:
        assert database.execute("SELECT count(*) FROM stat WHERE what = 'x'").fetchone() == (160,)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_a_database_opened_before_a_fork_is_not_shared_with_the_child(cache: Cache, old_file: Path) -> None:
    cache.stat.digest(old_file)

    def child() -> None:
        assert cache.stat.digest(old_file) == digest_file(old_file)
        cache.stat.value(old_file, "child", digest_file)

    assert in_process(child)
    count = Counted()
    assert Cache(cache.root).stat.value(old_file, "child", count) == digest_file(old_file)
    assert count.calls == 0


def test_gc_forgets_files_that_are_gone(cache: Cache, old_file: Path) -> None:
    publish(cache, make_action())
    cache.stat.digest(old_file)
    old_file.unlink()
    cache.gc(0)
    with sqlite3.connect(cache.root / "v1/stat.sqlite") as database:
        assert database.execute("SELECT count(*) FROM stat").fetchone() == (0,)
    database.close()
