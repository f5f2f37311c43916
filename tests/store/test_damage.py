"""Whatever is damaged on the disk is found, put aside, and built again."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdflow.artifact import Record
from sdflow.digest import canonical_json
from sdflow.store import Cache, CorruptArtifactError

from .builds import assert_complete, build, contents, make_action, names, overwrite, publish


def action_file(cache: Cache, record: Record) -> Path:
    return cache.root / "v1/actions" / record.action.digest[:2] / f"{record.action.digest}.json"


def flip_bit(path: Path, *, restore_time: bool) -> None:
    """One bit, the same length, in place; `restore_time` sets mtime back."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    path.chmod(0o444)
    if restore_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


def assert_rebuilt(cache: Cache, record: Record) -> None:
    """The damaged entry is a miss, and building it gives the right thing again."""
    assert cache.lookup(record.action) is None
    again = build(cache, record.action)
    assert again.artifact.digest == record.artifact.digest
    assert_complete(again, contents(record.action))
    assert cache.lookup(record.action) == again
    assert cache.verify().damaged == ()


@pytest.mark.parametrize("restore_time", [False, True])
@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "extra/notes.txt"])
def test_a_flipped_bit_is_found_by_lookup_and_rebuilt(cache: Cache, name: str, restore_time: bool) -> None:
    record = publish(cache, make_action())
    flip_bit(record.artifact.path / name, restore_time=restore_time)
    assert_rebuilt(cache, record)
    assert len(names(cache.root / "v1/quarantine")) == 1


def flip_bit_unseen(cache: Cache, record: Record) -> None:
    """A bit that rots on the disk: no stat changes. Here the stat cache is told that all is as it was."""
    path = record.artifact.path / "model.onnx.data"
    flip_bit(path, restore_time=True)
    found = path.stat()
    cache.stat.close()
    with sqlite3.connect(cache.root / "v1/stat.sqlite") as database:
        changed = database.execute(
            "UPDATE stat SET identity = ? WHERE path LIKE '%/model.onnx.data'",
            (f"{found.st_size}:{found.st_mtime_ns}:{found.st_ino}:{found.st_ctime_ns}",),
        )
        assert changed.rowcount == 1
    database.close()


def test_a_flipped_bit_that_no_stat_shows_is_found_before_a_pass_reads_it(cache: Cache) -> None:
    record = publish(cache, make_action())
    flip_bit_unseen(cache, record)
    reader = Cache(cache.root)
    found = reader.lookup(record.action)
    assert found is not None
    with pytest.raises(CorruptArtifactError, match="is not what was published") as caught:
        reader.check(found.artifact)
    assert "Run again" in str(caught.value)
    assert_rebuilt(reader, record)


def test_verify_finds_every_flipped_bit(cache: Cache) -> None:
    records = [publish(cache, make_action(str(number))) for number in range(4)]
    flip_bit(records[1].artifact.path / "model.onnx", restore_time=True)
    os.utime(records[2].artifact.path / "model.onnx")
    report = Cache(cache.root).verify()
    assert [path.name for path, _ in report.damaged] == [records[1].artifact.digest]
    assert (report.objects, report.actions) == (3, 3)
    assert_rebuilt(cache, records[1])


def test_verify_finds_a_flipped_bit_that_no_stat_shows(cache: Cache) -> None:
    record = publish(cache, make_action())
    flip_bit_unseen(cache, record)
    assert len(Cache(cache.root).verify().damaged) == 1
    assert_rebuilt(Cache(cache.root), record)


def test_publishing_over_a_damaged_object_replaces_it(cache: Cache) -> None:
    record = publish(cache, make_action())
    cache.forget(record.action)
    flip_bit_unseen(cache, record)
    again = publish(Cache(cache.root), record.action)
    assert_complete(again, contents(record.action))
    assert cache.verify().damaged == ()


def test_a_truncated_action_file_is_a_miss(cache: Cache) -> None:
    """At every length, and the next build goes on."""
    record = publish(cache, make_action())
    path = action_file(cache, record)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert cache.lookup(record.action) is None
        assert not path.exists()
    assert_rebuilt(cache, record)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_changed_byte_of_an_action_file_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cache = Cache(tmp_path_factory.getbasetemp() / "changed-byte")
    record = build(cache, make_action())
    path = action_file(cache, record)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != whole[place]))
    path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
    assert cache.lookup(record.action) is None
    path.write_bytes(whole)
    assert cache.lookup(record.action) == record


GARBAGE: list[bytes] = [
    b"",
    b"\0" * 4096,
    b"null",
    b"[]",
    b"{}",
    b'{"record": 1, "sha256": "x"}',
    b"\xff\xfe",
    b"[" * 5000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=[str(number) for number in range(len(GARBAGE))])
def test_garbage_in_an_action_file_is_a_miss(cache: Cache, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    record = publish(cache, make_action())
    action_file(cache, record).write_bytes(garbage)
    with caplog.at_level(logging.WARNING, "sdflow.store"):
        assert cache.lookup(record.action) is None
    assert "quarantine" in caplog.text
    assert_rebuilt(cache, record)


def test_the_action_file_of_another_action_is_a_miss(cache: Cache) -> None:
    record, other = publish(cache, make_action("a")), publish(cache, make_action("b"))
    action_file(cache, record).write_bytes(action_file(cache, other).read_bytes())
    assert cache.lookup(record.action) is None
    assert cache.lookup(other.action) == other


def _remove_file(folder: Path) -> None:
    (folder / "files").chmod(0o755)
    (folder / "files/model.onnx").unlink()


def _remove_manifest(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "manifest.json").unlink()


def _remove_files(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "files").chmod(0o755)
    (folder / "files").rename(folder.parent / "stray")


def _truncate_manifest(folder: Path) -> None:
    overwrite(folder / "manifest.json", (folder / "manifest.json").read_bytes()[:-30])


def _change_manifest(folder: Path) -> None:
    overwrite(folder / "manifest.json", canonical_json({"files": [["model.onnx", 1, "0" * 64]]}))


def _truncate_file(folder: Path) -> None:
    overwrite(folder / "files/model.onnx.data", b"short")


def _link_file(folder: Path) -> None:
    (folder / "files").chmod(0o755)
    (folder / "files/model.onnx").rename(folder / "files/away")
    (folder / "files/model.onnx").symlink_to("away")


@pytest.mark.parametrize(
    "harm",
    [_remove_file, _remove_manifest, _remove_files, _truncate_manifest, _change_manifest, _truncate_file, _link_file],
)
def test_a_damaged_object_is_a_miss_and_goes_to_quarantine(cache: Cache, harm: Callable[[Path], None]) -> None:
    record = publish(cache, make_action())
    harm(record.artifact.path.parent)
    assert cache.lookup(record.action) is None
    (place,) = (cache.root / "v1/quarantine").iterdir()
    assert (place / record.artifact.digest).is_dir()
    assert (place / f"{record.action.digest}.json").is_file()
    assert record.artifact.digest in (place / "reason.txt").read_text()
    assert_rebuilt(cache, record)


def test_a_file_added_to_an_object_is_found_before_a_pass_reads_it(cache: Cache) -> None:
    record = publish(cache, make_action())
    record.artifact.path.chmod(0o755)
    (record.artifact.path / "onnxruntime.log").write_text("left here")
    with pytest.raises(CorruptArtifactError, match=r"onnxruntime\.log"):
        cache.check(record.artifact)
    assert_rebuilt(cache, record)


def test_a_manifest_cannot_lead_out_of_the_object(cache: Cache, tmp_path: Path) -> None:
    from sdflow.digest import FileEntry, digest_file, digest_tree
    from sdflow.store.layout import Layout
    from sdflow.store.objects import BadTree, read_manifest

    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    for name in ("../../../../../../outside", str(outside)):
        entry = FileEntry(name, 6, digest_file(outside))
        folder = Layout(cache.root).object(digest_tree([entry]))
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(canonical_json({"files": [[entry.path, entry.size, entry.sha256]]}))
        with pytest.raises(BadTree, match="outside the object"):
            read_manifest(folder, digest_tree([entry]))


def _directory(path: Path) -> None:
    path.parent.chmod(0o755)
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("which", ["action", "manifest", "pin", "step"])
def test_a_directory_in_the_place_of_a_file_is_put_aside_and_built_anew(
    cache: Cache, which: str, tmp_path: Path
) -> None:
    record = publish(cache, make_action())
    cache.pin("sd15", [record.artifact.digest], tmp_path)
    cache.notes.remember_step("sd15/unet/0", record.action)
    places = {
        "action": action_file(cache, record),
        "manifest": record.artifact.path.parent / "manifest.json",
        "pin": next((cache.root / "v1/pins").glob("*.json")),
        "step": next((cache.root / "v1/steps").iterdir()),
    }
    _directory(places[which])
    if which in ("action", "manifest"):
        assert cache.lookup(record.action) is None
        assert len(names(cache.root / "v1/quarantine")) == 1
    again = build(cache, record.action)
    assert_complete(again, contents(record.action))
    assert len(cache.entries()) == 1
    assert cache.gc().removed == ()
    assert cache.verify().damaged == ()
    cache.notes.remember_step("sd15/unet/0", record.action)
    assert cache.notes.last_action("sd15/unet/0") == record.action
    cache.pin("sd15", [record.artifact.digest], tmp_path)
    assert cache.entries()[0].pinned_by == ("sd15",)


@pytest.mark.parametrize("which", ["action", "manifest"])
def test_verify_finds_a_directory_in_the_place_of_a_file(cache: Cache, which: str) -> None:
    record = publish(cache, make_action())
    _directory(action_file(cache, record) if which == "action" else record.artifact.path.parent / "manifest.json")
    assert len(cache.verify().damaged) == 1
    assert_rebuilt(cache, record)


@pytest.mark.parametrize("what", ["a file too many", "a second link"])
def test_what_is_not_in_the_manifest_is_found_by_lookup(cache: Cache, tmp_path: Path, what: str) -> None:
    record = publish(cache, make_action())
    record.artifact.path.chmod(0o755)
    if what == "a file too many":
        (record.artifact.path / "stray").write_text("x")
    else:
        (tmp_path / "other").hardlink_to(record.artifact.path / "model.onnx")
    assert_rebuilt(cache, record)
    assert len(names(cache.root / "v1/quarantine")) == 1
