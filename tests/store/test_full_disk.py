"""A full disk loses nothing: what was there stays, nothing is half published, the message says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdflow.errors import CacheError
from sdflow.store import Cache

from .builds import assert_complete, build, contents, make_action, names, publish, write_files
from .faults import in_process, small_disk, small_files

SIZE = 1_000_000


def assert_nothing_lost(root: Path) -> None:
    """What was built before the disk was full is a hit; what failed is not there; after making room it is built."""
    cache = Cache(root)
    before, failed = make_action("before"), make_action("too big")
    record = cache.lookup(before)
    assert record is not None
    cache.check(record.artifact)
    assert cache.lookup(failed) is None
    assert names(root / "v1/staging") == []
    assert cache.verify().damaged == ()
    with cache.lease():
        assert cache.lookup(before) == record
    cache.notes.remember_step("sd15/unet/0", before)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()

    def run() -> None:
        kind = small_disk(place, SIZE)
        cache = Cache(place / "cache")
        publish(cache, make_action("before"))
        with pytest.raises(CacheError) as caught, cache.staging(make_action("too big")) as staging:
            (staging.files / "model.onnx.data").write_bytes(bytes(2 * SIZE))
        message = str(caught.value)
        assert "bytes are free" in message
        assert "sdflow cache gc" in message
        assert ("the disk is full" if kind == "tmpfs" else "file size limit") in message
        assert_nothing_lost(cache.root)
        assert_complete(build(cache, make_action("after")), contents(make_action("after")))

    assert in_process(run)


def fill(path: Path, room: int) -> None:
    """Write a file that leaves `room` bytes on its disk."""
    disk = os.statvfs(path.parent)
    path.write_bytes(bytes(max(0, disk.f_bavail * disk.f_frsize - room)))


def test_a_disk_that_fills_up_while_publishing_loses_nothing(tmp_path: Path) -> None:
    """For every amount of room that is left when publishing begins, from none at all to enough."""
    place = tmp_path / "disk"
    place.mkdir()

    def run() -> None:
        whole_disk = small_disk(place, SIZE) == "tmpfs"
        cache = Cache(place / "cache")
        before = publish(cache, make_action("before"))
        outcomes = []
        for pages in range(12):
            action = make_action("too big", pages=pages)
            try:
                with cache.staging(action) as staging:
                    write_files(staging.files, contents(action, 9_000))
                    if whole_disk:
                        fill(place / "ballast", pages * 4096)
                    else:
                        small_files(pages * 100)
                    staging.publish({}, {})
                outcomes.append("published")
            except CacheError as error:
                outcomes.append("full")
                assert error.exit_code == 3
                assert "bytes are free" in str(error)
                assert Cache(cache.root).lookup(action) is None
            assert cache.lookup(before.action) == before  # also while the disk is full
            (place / "ballast").unlink(missing_ok=True)
            assert names(cache.root / "v1/staging") == []
            assert cache.verify().damaged == ()
            if whole_disk:
                assert_complete(
                    build(cache, action), contents(action, 9_000 if outcomes[-1] == "published" else 20_000)
                )
        assert outcomes[0] == "full"
        assert not whole_disk or outcomes[-1] == "published"

    assert in_process(run)


def test_a_file_size_limit_is_said_and_loses_nothing(tmp_path: Path) -> None:
    """The quota that an ordinary user can set: every write beyond it fails."""
    cache = Cache(tmp_path / "cache")

    def run() -> None:
        publish(cache, make_action("before"))
        small_files(30_000)
        with pytest.raises(CacheError, match="file size limit"), cache.staging(make_action("too big")) as staging:
            write_files(staging.files, contents(make_action("too big"), 100_000))
        assert_nothing_lost(cache.root)

    assert in_process(run)


def test_a_full_disk_still_serves_hits_and_can_be_collected(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()

    def run() -> None:
        if small_disk(place, SIZE) == "limit":
            small_files(20_000)
        cache = Cache(place / "cache")
        records = [publish(cache, make_action(str(number))) for number in range(3)]
        if os.statvfs(place).f_blocks * os.statvfs(place).f_frsize == SIZE // 4096 * 4096:
            fill(place / "cache/v1/trash/ballast", 0)
        reader = Cache(cache.root)
        with reader.lease():
            for record in records:
                assert reader.lookup(record.action) == record
                reader.check(record.artifact)
        reader.notes.remember_step("sd15/unet/0", records[0].action)
        assert len(reader.gc(45_000).removed) == 1
        assert_complete(build(reader, make_action("after"), locked=True), contents(make_action("after")))

    assert in_process(run)
