"""A remote cache in a shared folder: what goes up, what comes down, and what is believed of it."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sdflow import stop
from sdflow.store.layout import Layout
from sdflow.store.records import dump, load
from sdflow.store.remote import catalog, down, remote, share
from sdflow.store.remote.down import incoming
from sdflow.store.remote.entry import MOST, SMALL, TOGETHER, sizes
from sdflow.store.remote.share import FOLDER, Share, Unusable
from sdflow.store.remote.spec import without_secrets

from .machines import BUILT, Machine, files_of, make_action


@pytest.fixture
def shared(memory_path: Path) -> Path:
    return memory_path / "shared"


@pytest.fixture
def one(memory_path: Path, shared: Path) -> Machine:
    return Machine(memory_path / "one", str(shared))


@pytest.fixture
def other(memory_path: Path, shared: Path) -> Machine:
    return Machine(memory_path / "other", str(shared))


def stored(shared: Path, kind: str) -> list[Path]:
    return sorted(path for path in (shared / FOLDER / kind).rglob("*") if path.is_file())


def big(seed: bytes, size: int = 5 << 20) -> dict[str, bytes]:
    """Files of which one takes several pieces, no two alike."""
    data = random.Random(seed).randbytes(size)
    return {"model.onnx": seed, "model.onnx.data": data, "deep/er/notes.txt": b"n", "empty": b""}


def test_what_one_machine_builds_another_fetches(one: Machine, other: Machine) -> None:
    action = make_action()
    files = big(b"a")
    built = one.build(action, files)
    fetched = other.fetch(action)
    assert fetched is not None
    assert fetched.artifact.digest == built.artifact.digest
    assert files_of(fetched) == files
    assert fetched.facts == built.facts
    assert fetched.built["from"] == other.url
    assert other.cache.lookup(action) == other.cache.lookup(fetched.action)
    assert other.cache.verify().damaged == ()
    assert not list(other.folder.glob("v1/incoming/*"))
    assert one.told == [f"pushed 1 results to {one.url}: 5.24 MB sent, 0 B were there"]


def test_without_being_asked_nothing_is_pushed(tmp_path: Path, shared: Path) -> None:
    reader = Machine(tmp_path / "reader", str(shared), push=False)
    reader.build(make_action())
    assert not shared.exists()


def test_what_the_remote_has_is_not_sent_twice(one: Machine, other: Machine) -> None:
    files = big(b"a")
    one.build(make_action("base"), files)
    other.build(make_action("lora"), {**files, "model.onnx": b"b"})
    assert other.told == [f"pushed 1 results to {other.url}: 1 B sent, 5.24 MB were there"]


def test_a_push_that_ends_at_any_moment_leaves_nothing_that_counts(
    one: Machine, other: Machine, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next goes on from there."""
    action = make_action()
    files = {f"{index}": bytes([index]) * 10 for index in range(3)}
    record = one.build(action, files)
    for path in stored(shared, ""):
        path.unlink()
    write, order = Share.write, []

    def breaks(self: Share, path: str, data: bytes) -> None:
        if order:
            raise Unusable("the line is cut", final=True)
        order.append(path)
        write(self, path, data)

    for _ in range(5):
        order.clear()
        monkeypatch.setattr(Share, "write", breaks)
        one.again()
        assert one.remote.push(record) is None
        monkeypatch.setattr(Share, "write", write)
        assert other.fetch(action) is None
        assert other.told == []
        assert not stored(shared, "actions")
    one.again()
    assert one.remote.push(record) is not None
    monkeypatch.undo()
    fetched = other.fetch(action)
    assert fetched is not None
    assert files_of(fetched) == files


def damage(kind: str) -> Callable[[bytes], bytes]:
    return {
        "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
        "truncated": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
        "longer": lambda data: data + b" ",
        "garbage": lambda data: b"\xff" * len(data),
    }[kind]


@pytest.mark.parametrize("kind", ["flipped", "truncated", "empty", "longer", "garbage"])
@pytest.mark.parametrize("which", ["pieces", "objects", "actions"])
def test_what_is_wrong_is_put_aside_and_built_here(
    one: Machine, other: Machine, shared: Path, which: str, kind: str
) -> None:
    action = make_action()
    one.build(action)
    for path in stored(shared, which):
        path.write_bytes(damage(kind)(path.read_bytes()))
    record = other.build(action)
    if which != "pieces" and kind == "longer":  # white space behind JSON changes nothing
        assert other.told == []
    else:
        assert len(other.told) == 2, "once what is wrong, once that it was pushed"
        assert "returned wrong content" in other.told[0]
        assert len(other.quarantined()) == 1
    assert files_of(record) == files_of(one.build(action))
    # What was built is pushed in place of it: a third machine finds it whole.
    third = Machine(other.folder.with_name("third"), other.url)
    assert third.fetch(action) is not None
    assert third.told == []


def test_an_entry_of_another_action_is_no_answer(one: Machine, other: Machine, shared: Path) -> None:
    wanted, given = make_action("wanted"), make_action("given")
    one.build(wanted)
    one.build(given)
    place = {path.stem: path for path in stored(shared, "actions")}
    place[wanted.digest].write_bytes(place[given.digest].read_bytes())
    assert other.fetch(wanted) is None
    assert "it belongs to another action" in other.told[0]


@pytest.mark.parametrize("path", ["../out", "/out", "a/../../out", "C:/out", "a\\b", "a//b", ".", "a\0b"])
def test_a_manifest_that_names_what_lies_outside_is_not_believed(
    one: Machine, other: Machine, shared: Path, path: str
) -> None:
    from sdflow.digest import FileEntry, digest_tree

    action = make_action()
    one.build(action, {"a": b"content"})
    (manifest,), (entry,) = stored(shared, "objects"), stored(shared, "actions")
    body = load(manifest.read_bytes())
    body["files"][0][0] = path
    tree = digest_tree([FileEntry(*body["files"][0][:3])])
    manifest.unlink()
    target = shared / FOLDER / "objects" / tree[:2] / f"{tree}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(dump({**body, "object": tree}))
    entry.write_bytes(dump({**load(entry.read_bytes()), "object": tree}))
    assert other.fetch(action) is None
    assert "outside the object" in other.told[0]
    assert not (other.folder.parent / "out").exists()


@pytest.mark.parametrize("piece", [[0, "0" * 64], [7, "../out"]])
def test_a_manifest_with_a_piece_that_is_none_is_not_believed(
    one: Machine, other: Machine, shared: Path, piece: list[Any]
) -> None:
    action = make_action()
    one.build(action, {"a": b"content"})
    (manifest,) = stored(shared, "objects")
    body = load(manifest.read_bytes())
    body["files"][0][3] = [piece]
    manifest.write_bytes(dump(body))
    assert other.fetch(action) is None
    assert "a piece of a has an invalid size or digest" in other.told[0]


@pytest.mark.parametrize(
    ("what", "value"),
    [
        *(("built", built) for built in ({}, {"seconds": "x"}, {**BUILT, "peak_memory": None}, [], None)),
        ("built", {**BUILT, "seconds": 10**400}),
        *(
            ("facts", facts)
            for facts in ([], {"operators": 5}, {"operators": {"Conv": "x"}}, {"dtypes": {"float16": 1}})
        ),
    ],
)
def test_what_the_reports_would_stumble_on_is_not_believed(
    one: Machine, other: Machine, shared: Path, what: str, value: object
) -> None:
    action = make_action()
    one.build(action)
    (entry,) = stored(shared, "actions")
    entry.write_bytes(dump({**load(entry.read_bytes()), what: value}))
    assert other.fetch(action) is None
    assert "returned wrong content" in other.told[0]


@pytest.mark.parametrize("which", ["pieces", "objects"])
def test_what_a_retention_rule_removes_under_a_reader_is_built_here_and_pushed_again(
    one: Machine, other: Machine, shared: Path, which: str
) -> None:
    action = make_action()
    one.build(action)
    assert other.remote.look(action.digest) is not None
    for path in stored(shared, which):
        path.unlink()
    record = other.build(action)
    assert other.told[0].startswith(f"{other.url} has lost parts of an entry")
    assert other.quarantined() == []
    third = Machine(other.folder.with_name("third"), other.url)
    fetched = third.fetch(action)
    assert fetched is not None
    assert fetched.artifact.digest == record.artifact.digest


def test_a_download_that_broke_is_gone_on_with(one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process too; what is left of it is hashed again, not believed."""
    action, files = make_action(), big(b"a", 17 << 20)
    one.build(action, files)
    read, pieces = Share.read, []

    def breaks(self: Share, path: str, limit: int) -> bytes:
        if path.startswith("pieces/"):
            if len(pieces) == 3:
                raise Unusable("the line is cut", final=True)
            pieces.append(path)
        return read(self, path, limit)

    monkeypatch.setattr(Share, "read", breaks)
    monkeypatch.setattr(share, "LINES", 1)
    assert other.fetch(action) is None
    assert other.told == [f"the remote cache {other.url} is not used for the rest of this run: the line is cut"]
    (part,) = other.folder.glob("v1/incoming/*/model.onnx.data")
    data, whole = bytearray(part.read_bytes()), files["model.onnx.data"]
    came = [begin for begin in range(0, len(whole), MOST) if data[begin : begin + MOST] == whole[begin : begin + MOST]]
    data[came[0]] ^= 1
    part.write_bytes(bytes(data))
    first = len(pieces)
    pieces.clear()

    def counts(self: Share, path: str, limit: int) -> bytes:
        if path.startswith("pieces/"):
            pieces.append(path)
        return read(self, path, limit)

    monkeypatch.setattr(Share, "read", counts)
    age(part.parent, 20 * 24 * 3600.0)
    assert incoming(Layout(other.folder), other.remote._known[action.digest]) == part.parent
    other.cache.gc()
    assert part.exists(), "what is gone on with is no rubbish"
    other.again()
    monkeypatch.setattr(remote, "free_bytes", lambda root: 1 << 20)  # what is there needs no room any more
    fetched = other.fetch(action)
    assert fetched is not None
    assert files_of(fetched) == files
    total = len(list(sizes(17 << 20, ()))) + 2
    assert len(pieces) == total - first + 1, "one piece was damaged meanwhile"


def test_a_remote_that_is_slow_is_left_when_building_takes_less(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the speed so far: pieces come all the time, but would do so for longer than an object may take."""
    monkeypatch.setitem(BUILT, "seconds", 0.0)
    action, files = make_action(), big(b"a", 17 << 20)
    one.build(action, files)
    monkeypatch.setattr(share, "LINES", 1)
    monkeypatch.setattr(down, "SETTLING", 0.0)
    monkeypatch.setattr(remote, "PATIENCE", 0.0)
    record = other.build(action, files)
    assert files_of(record) == files
    assert "from" not in record.built
    assert len(other.told) == 1
    assert "is not used for the rest of this run: too slow: " in other.told[0]


def test_what_this_machine_has_is_not_fetched(one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    base, lora = big(b"a"), big(b"a")
    lora["model.onnx.data"] = lora["model.onnx.data"][: 4 << 20] + b"x" * (1 << 20)
    one.build(make_action("lora"), lora)
    other.cache.remote, remote = None, other.remote
    with other.cache.staging(make_action("base")) as staging:
        for name, data in base.items():
            (staging.files / name).parent.mkdir(parents=True, exist_ok=True)
            (staging.files / name).write_bytes(data)
        staging.publish({}, {})
    other.cache.remote = remote
    read, pieces = Share.read, []

    def counts(self: Share, path: str, limit: int) -> bytes:
        data = read(self, path, limit)
        pieces.extend([len(data)] if path.startswith("pieces/") else [])
        return data

    monkeypatch.setattr(Share, "read", counts)
    fetched = other.fetch(make_action("lora"))
    assert fetched is not None
    assert files_of(fetched) == lora
    assert sum(pieces) <= (1 << 20) + 10


def test_two_machines_that_push_the_same_action_agree(one: Machine, other: Machine, shared: Path) -> None:
    """Whatever each has built, a third gets one of them whole; who was first stays."""
    action = make_action()
    with ThreadPoolExecutor(2) as threads:
        built = list(
            threads.map(lambda each: each[0].build(action, big(each[1], 1 << 20)), ((one, b"a"), (other, b"b")))
        )
    third = Machine(other.folder.with_name("third"), other.url)
    fetched = third.fetch(action)
    assert fetched is not None
    assert fetched.artifact.digest in {record.artifact.digest for record in built}
    (entry,) = stored(shared, "actions")
    before = entry.read_bytes()
    for machine in (one, other):
        machine.again()
        machine.build(action)
    assert entry.read_bytes() == before


def test_what_has_no_room_is_said_and_built_here(one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one.build(make_action(), big(b"a"))
    monkeypatch.setattr(remote, "free_bytes", lambda root: 1 << 20)
    assert other.fetch(make_action()) is None
    assert "not enough disk space for " in other.told[0]
    assert other.remote.unusable is None


def test_a_remote_that_is_a_file_is_said_once_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine = Machine(tmp_path / "cache", str(tmp_path / "file"))
    for name in ("a", "b", "c"):
        assert files_of(machine.build(make_action(name)))
    assert len(machine.told) == 1
    assert "is not used for the rest of this run" in machine.told[0]


def test_a_package_that_is_not_installed_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "adlfs", None)
    machine = Machine(tmp_path / "cache", "az://container/prefix")
    machine.build(make_action("a"))
    machine.build(make_action("b"))
    assert len(machine.told) == 1
    assert "pip install 'sdflow[az]'" in machine.told[0]


@pytest.mark.parametrize("error", [ValueError("odd"), stop.Stopped()])
def test_nobody_waits_for_a_push_that_cannot_go_on(
    error: BaseException, one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)

    def fails(folder: Path) -> Mapping[str, Sequence[int]]:
        raise error

    one.cuts = fails
    one.again()
    one.build(make_action())
    assert ended == []
    assert [text for text in one.told if "nothing is pushed" in text] == one.told
    assert bool(one.told) == isinstance(error, ValueError)


def test_a_run_behind_one_that_failed_pushes_too(one: Machine, other: Machine) -> None:
    actions = [make_action(name) for name in "abc"]
    one.build(actions[0])
    with pytest.raises(RuntimeError, match="a build fails"), one.cache.lease():
        raise RuntimeError("a build fails")
    for action in actions[1:]:
        one.build(action)
    assert all(other.fetch(action) is not None for action in actions)


# What a remote holds, and how it shrinks


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_gc_removes_what_is_old_and_what_nothing_refers_to(one: Machine, other: Machine, shared: Path) -> None:
    files = big(b"a")
    one.build(make_action("old"), files)
    one.build(make_action("new"), {**files, "model.onnx": b"new"})
    day = 24 * 3600.0
    for path in stored(shared, ""):
        age(path, 40 * day)
    (new,) = (path for path in stored(shared, "actions") if path.stem == make_action("new").digest)
    age(new, 2 * day)
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*")}
    would = catalog.sweep(one.remote.share, 30 * day, dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in shared.rglob("*")} == before, "who only looks writes nothing"
    assert (would.actions, would.manifests, would.pieces) == (1, 1, 1)
    assert len(stored(shared, "actions")) == 2
    piece = stored(shared, "pieces")[0]
    parts = [piece.with_name(f"{piece.name}.{name}.part") for name in ("dead", "alive")]
    for path, seconds in zip(parts, (2 * day, 0), strict=True):
        path.write_bytes(b"half")
        age(path, seconds)
    assert catalog.sweep(one.remote.share, 30 * day) == would
    assert [path.exists() for path in parts] == [False, True]
    assert other.fetch(make_action("old")) is None
    fetched = other.fetch(make_action("new"))
    assert fetched is not None
    assert files_of(fetched) == {**files, "model.onnx": b"new"}
    assert [each.entry.action.digest for each in catalog.listed(one.remote.share)] == [make_action("new").digest]


def test_gc_goes_by_the_clock_of_the_store(one: Machine, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one.build(make_action())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90 * 24 * 3600)
    assert catalog.sweep(one.remote.share, 24 * 3600.0).actions == 0
    assert len(stored(shared, "actions")) == 1


def test_gc_leaves_what_is_on_its_way_where_listings_lag(
    one: Machine, other: Machine, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The action was pushed, and the listing does not have it and its manifest yet."""
    one.build(make_action())
    listing = Share.list
    monkeypatch.setattr(Share, "list", lambda self, folder: listing(self, folder) if folder == "pieces" else iter(()))
    swept = catalog.sweep(one.remote.share, 30 * 24 * 3600.0)
    assert (swept.manifests, swept.pieces) == (0, 0)
    assert other.fetch(make_action()) is not None


def test_an_action_that_is_no_map_is_not_listed(one: Machine, shared: Path) -> None:
    from sdflow.digest import digest_json

    one.build(make_action())
    (entry,) = stored(shared, "actions")
    digest = digest_json(["x"])
    odd = shared / FOLDER / "actions" / digest[:2] / f"{digest}.json"
    odd.parent.mkdir(exist_ok=True)
    odd.write_bytes(dump({**load(entry.read_bytes()), "action": ["x"]}))
    assert [each.entry.action for each in catalog.listed(one.remote.share)] == [make_action()]


def test_what_is_pushed_again_while_gc_removes_it_does_not_stay_in_parts(
    one: Machine, other: Machine, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.build(make_action())
    for path in stored(shared, ""):
        age(path, 40 * 24 * 3600.0)
    remove, share = Share.remove, Share(one.remote.spec)

    def and_pushed(self: Share, path: str) -> None:
        remove(self, path)
        if path.startswith("actions/"):
            monkeypatch.undo()
            one.again()
            one.build(make_action())

    monkeypatch.setattr(Share, "remove", and_pushed)
    catalog.sweep(share, 30 * 24 * 3600.0)
    assert stored(shared, "actions") == []
    one.again()
    one.build(make_action())
    assert other.fetch(make_action()) is not None


# Pieces


def test_the_pieces_of_a_file_make_it_up_and_are_cut_by_places_alone() -> None:
    for size, cuts in ((0, ()), (1, ()), (MOST, ()), (3 * MOST + 5, (7, MOST)), (10 << 20, range(0, 10 << 20, 1000))):
        found = list(sizes(size, cuts))
        assert sum(found) == size
        assert all(0 < each <= MOST for each in found)
    small = list(sizes(10 * TOGETHER, range(0, 10 * TOGETHER, SMALL // 2)))
    assert len(small) == 10, "small tensors go together"
    assert list(sizes(1 << 20, (200_000, 500_000))) == [200_000, 300_000, (1 << 20) - 500_000]


def test_nothing_secret_is_said_or_kept(tmp_path: Path) -> None:
    url = "https://someone:hunter2@127.0.0.1:1/prefix?sig=abcdef"
    machine = Machine(tmp_path / "cache", url)
    machine.build(make_action())
    said = " ".join([*machine.told, machine.remote.spec.shown, str(machine.remote.unusable)])
    assert "127.0.0.1" in said
    for path in tmp_path.rglob("*"):
        if path.is_file():
            said += path.read_bytes().decode(errors="replace")
    assert "hunter2" not in said
    assert "abcdef" not in said


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:hunter2@host:1/a?sig=x#y", "https://host:1/a"),
        ("simplecache::https://me:hunter2@host/a?sig=x", "simplecache::https://host/a"),
        ("zip://a.zip::https://me:hunter2@host/a", "zip://a.zip::https://host/a"),
        ("http://me:hunter2@[::1]:80/a", "http://[::1]:80/a"),
        ("/mnt/a#b?c", "/mnt/a#b?c"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_what_goes_up_says_nothing_of_this_machine(one: Machine, shared: Path) -> None:
    """But for its results: no path, no name, and not where it had them from."""
    one.build(make_action())
    for path in (*stored(shared, "objects"), *stored(shared, "actions")):
        body = json.loads(path.read_bytes())["record"]
        assert set(body) in (
            {"format", "object", "files"},
            {"format", "action", "object", "facts", "built", "published"},
        )
        assert str(one.folder.parent) not in path.read_text()
