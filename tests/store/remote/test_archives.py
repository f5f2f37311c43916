"""A remote in one zip file: written as a whole, read in place, and as little believed as any other."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sdflow.errors import UsageError
from sdflow.store import Cache
from sdflow.store.copying import copy_entries
from sdflow.store.remote import RemoteSpec, catalog
from sdflow.store.remote.archives import to_write
from sdflow.store.remote.spec import at

from ..builds import contents, make_action, publish
from .machines import BUILT, Machine, files_of

ACTIONS = [make_action(name) for name in ("one", "two")]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """With two finished actions."""
    cache = Cache(tmp_path / "builder")
    for action in ACTIONS:
        with cache.staging(action) as staging:
            for name, data in contents(action).items():
                (staging.files / name).parent.mkdir(exist_ok=True)
                (staging.files / name).write_bytes(data)
            staging.publish({"nodes": 3}, BUILT)
    path = tmp_path / "builds.zip"
    with to_write(RemoteSpec(at(str(path), "--url"))) as place:
        assert copy_entries(cache.at(place), ACTIONS, up=True).sent.results == 2
    return path


def test_what_is_pushed_to_an_archive_is_listed_and_fetched(archive: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "other", at(str(archive), "--url"), push=False)
    assert machine.remote.spec.shown == str(archive)
    listed = {each.entry.action.digest for each in catalog.listed(machine.remote.share)}
    assert listed == {action.digest for action in ACTIONS}
    for action in ACTIONS:
        record = machine.fetch(action)
        assert record is not None
        assert files_of(record) == contents(action)
        assert record.built["from"] == str(archive)
    assert machine.fetch(make_action("not there")) is None
    assert machine.told == []


def test_a_run_does_not_push_into_an_archive_and_says_so_once(archive: Path, tmp_path: Path) -> None:
    before = archive.read_bytes()
    machine = Machine(tmp_path / "other", at(str(archive), "--url"))
    for name in ("three", "four"):
        machine.build(make_action(name))
    (told,) = machine.told
    assert "an archive is written as a whole" in told
    assert archive.read_bytes() == before


def test_an_archive_that_cannot_be_written_leaves_what_was_there(archive: Path, tmp_path: Path) -> None:
    before = archive.read_bytes()
    with pytest.raises(KeyboardInterrupt), to_write(RemoteSpec(at(str(archive), "--url"))) as place:
        publish(Cache(tmp_path / "third"), make_action("third"))
        copy_entries(Cache(tmp_path / "third", remote=place), [make_action("third")], up=True)
        raise KeyboardInterrupt
    assert archive.read_bytes() == before
    assert [path.name for path in tmp_path.glob("*builds*")] == ["builds.zip"]


def test_what_is_pushed_into_an_archive_leaves_what_it_has(archive: Path, tmp_path: Path) -> None:
    third, spec = make_action("third"), RemoteSpec(at(str(archive), "--url"))
    builder = Machine(tmp_path / "third", str(tmp_path / "nowhere"), push=False)
    builder.build(third)
    with to_write(spec, add=True) as place:
        copy_entries(builder.cache.at(place), [third], up=True)
    machine = Machine(tmp_path / "other", spec.url, push=False)
    for action in (*ACTIONS, third):
        record = machine.fetch(action)
        assert record is not None and files_of(record) == contents(action)
    with to_write(spec):
        pass
    assert zipfile.ZipFile(archive).namelist() == [], "an export replaces it"


def _foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("photo.jpg", b"x")


def _zip_with_a_path(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sdflow-v1/../../evil", b"x")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("model: x\n"), "not written by sdflow"),
        (_foreign_zip, "not written by sdflow"),
        (_zip_with_a_path, "evil"),
    ],
)
def test_another_file_is_not_replaced(make: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "fox.yaml"
    make(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=says), to_write(RemoteSpec(at(str(path), "--url")), add=True):
        raise AssertionError("nothing is pushed")
    assert path.read_bytes() == before


def _repacked(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))


def _twice(path: Path) -> None:
    """Every name a second time, for something else: the last one counts, and is not what belongs there."""
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        for name in archive.namelist():
            archive.writestr(name, b"x")


def _encrypted(path: Path) -> None:
    """By the flag of each entry in the directory at the end."""
    data = path.read_bytes()
    parts = data.split(b"PK\x01\x02")
    path.write_bytes(b"PK\x01\x02".join([parts[0], *(each[:4] + b"\x01" + each[5:] for each in parts[1:])]))


LIES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "empty": lambda path: path.write_bytes(b""),
    "a bomb": lambda path: _repacked(path, lambda name, data: bytes(100 << 20)),
    "other bytes": lambda path: _repacked(path, lambda name, data: data[:-1] + b"x"),
    "nothing": lambda path: _repacked(path, lambda name, data: b""),
    "compressed by LZMA": lambda path: _repacked(path, lambda name, data: data, zipfile.ZIP_LZMA),
    "twice": _twice,
    "encrypted": _encrypted,
    "flipped in the middle": lambda path: path.write_bytes(
        (data := path.read_bytes())[: len(data) // 3] + bytes(64) + data[len(data) // 3 + 64 :]
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_archive_that_lies_costs_no_build(lie: str, archive: Path, tmp_path: Path) -> None:
    LIES[lie](archive)
    machine = Machine(tmp_path / "other", at(str(archive), "--url"), push=False)
    for action in ACTIONS:
        assert files_of(machine.build(action)) == contents(action)
    assert machine.cache.verify().damaged == ()
    assert len(machine.told) == 1 and len(machine.told[0]) < 1000, machine.told
