"""A remote cache behind real servers, and behind lines that break, lie and stall. Each server is a process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdflow.store.remote import catalog

from ..builds import contents
from .machines import Machine, files_of, make_action, require_a_round, server

pytest.importorskip("aiohttp", reason="pip install -e '.[test]'")
ACTION = make_action("served")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A folder with a finished action, and the port at which it is served over HTTP."""
    folder = tmp_path_factory.mktemp("served")
    Machine(folder / "cache", str(folder / "shared")).build(ACTION)
    with server("http_server.py", folder / "shared") as port:
        yield folder / "shared", port


@pytest.fixture(scope="module")
def s3() -> Iterator[int]:
    pytest.importorskip("moto", reason="pip install -e '.[test]'")
    with server("s3_server.py") as port:
        yield port


@pytest.fixture
def credentials(s3: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEKEY",
        "AWS_SECRET_ACCESS_KEY": "verysecretvalue",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


def bucket(name: str) -> str:
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/some/prefix"


@pytest.fixture(scope="module")
def bad_line(served: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The served folder behind a line that does what a file says."""
    fault = tmp_path_factory.mktemp("fault") / "fault.json"
    fault.write_text("{}")
    with server("bad_line.py", served[1], fault) as port:
        yield f"http://127.0.0.1:{port}", fault


def test_reading_over_http(served: tuple[Path, int], tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cache", f"http://127.0.0.1:{served[1]}", push=False)
    record = machine.fetch(ACTION)
    assert record is not None
    assert files_of(record) == contents(ACTION)
    assert machine.fetch(make_action("not there")) is None
    assert machine.told == []


def test_a_remote_that_cannot_be_written_is_said_once_and_read_from(served: tuple[Path, int], tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cache", f"http://127.0.0.1:{served[1]}")
    assert machine.fetch(ACTION) is not None
    for name in ("new", "newer"):
        machine.build(make_action(name))
    assert len(machine.told) == 1, machine.told
    assert "nothing is pushed to http://127.0.0.1" in machine.told[0]
    assert machine.fetch(make_action("not there")) is None
    assert machine.remote.unusable is None


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "gone": ({"kind": "drop"}, "is not used for the rest of this run"),
    "gone in the middle": ({"kind": "drop", "of": "pieces", "first": 2}, "is not used for the rest of this run"),
    "forbidden": ({"kind": 403}, "is not used for the rest of this run: ClientResponseError: 403"),
    "forbidden in the middle": ({"kind": 403, "of": "pieces", "first": 1}, "403"),
    "failing": ({"kind": 500}, "500"),
    "truncating": ({"kind": "truncate", "of": "pieces"}, "returned wrong content: pieces/"),
    "truncating manifests": ({"kind": "truncate", "of": "objects"}, "returned wrong content: objects/"),
    "lying": ({"kind": "flip", "of": "pieces"}, "returned wrong content: pieces/"),
    "lying of actions": ({"kind": "flip", "of": "actions"}, "returned wrong content: actions/"),
    "stalling": ({"kind": "delay", "seconds": 30}, "is not used for the rest of this run: no answer"),
    "stalling in the middle": (
        {"kind": "delay", "seconds": 30, "of": "pieces"},
        "is not used for the rest of this run: no answer",
    ),
    "without pieces": ({"kind": 404, "of": "pieces"}, "has lost parts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_remote_that_is(
    fault: str, bad_line: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never fails a build, never changes its result, and is said once."""
    from sdflow.store.remote import remote

    monkeypatch.setattr(remote, "TRIES", 1)
    url, control = bad_line
    harm, said = FAULTS[fault]
    control.write_text(json.dumps({**harm, "salt": fault}))
    try:
        machine = Machine(tmp_path / "cache", url, push=False, timeout=1.0 if harm["kind"] == "delay" else 20.0)
        record = machine.build(ACTION)
        machine.build(make_action("other"))
    finally:
        control.write_text("{}")
    assert files_of(record) == contents(ACTION)
    assert "from" not in record.built
    assert len([text for text in machine.told if said in text]) == 1, machine.told
    assert len(machine.told) == 1, machine.told


@pytest.mark.parametrize("kind", ["drop", "flip", "truncate", 500])
def test_a_line_that_recovers_is_used(kind: object, bad_line: tuple[str, Path], tmp_path: Path) -> None:
    url, control = bad_line
    control.write_text(json.dumps({"kind": kind, "of": "pieces", "times": 1, "salt": f"once {kind}"}))
    try:
        machine = Machine(tmp_path / "cache", url, push=False)
        record = machine.fetch(ACTION)
    finally:
        control.write_text("{}")
    assert record is not None
    assert files_of(record) == contents(ACTION)
    assert machine.told == []


@pytest.mark.usefixtures("credentials")
def test_an_s3_server(tmp_path: Path) -> None:
    url = bucket("roundtrip")
    one, other = Machine(tmp_path / "one", url), Machine(tmp_path / "other", url)
    require_a_round(url, one, other)
    assert catalog.sweep(other.remote.share, 3600.0).actions == 0
    assert catalog.sweep(other.remote.share, -60.0).pieces == 4
    assert catalog.listed(other.remote.share) == []


@pytest.mark.usefixtures("credentials")
def test_a_bucket_that_may_not_be_listed_refuses_what_it_lacks(
    s3: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers 403 then, and has what it has."""
    url = bucket("unlisted")
    Machine(tmp_path / "one", url).build(ACTION)
    fault = tmp_path / "fault.json"
    with server("bad_line.py", s3, fault) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        machine = Machine(tmp_path / "cache", url)
        for name in ("lacking", "lacking too"):
            fault.write_text(json.dumps({"kind": 403, "of": make_action(name).digest}))
            assert machine.fetch(make_action(name)) is None
        fault.write_text("{}")
        fetched = machine.fetch(ACTION)
    assert fetched is not None
    assert files_of(fetched) == contents(ACTION)
    assert len(machine.told) == 1, machine.told
    assert "answered 403" in machine.told[0]


@pytest.mark.slow
@pytest.mark.usefixtures("credentials")
def test_two_machines_push_to_s3_at_once(tmp_path: Path) -> None:
    url = bucket("race")
    machines = [Machine(tmp_path / name, url) for name in "ab"]
    threads = [
        threading.Thread(target=partial(machine.build, ACTION, {"model.onnx": machine.folder.name.encode()}))
        for machine in machines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fetched = Machine(tmp_path / "third", url).fetch(ACTION)
    assert fetched is not None
    assert files_of(fetched)["model.onnx"] in (b"a", b"b")


@pytest.mark.slow
@pytest.mark.usefixtures("credentials")
def test_a_bucket_that_is_not_there_and_its_secrets(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cache", "s3://no-such-bucket/prefix")
    machine.build(ACTION)
    machine.build(make_action("other"))
    said = " ".join(machine.told)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            said += path.read_bytes().decode(errors="replace")
    assert "verysecretvalue" not in said
    assert "AKIAEXAMPLEKEY" not in said
    assert len(machine.told) == 1, machine.told


@pytest.mark.slow
@pytest.mark.usefixtures("credentials")
def test_a_full_store(s3: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = bucket("full")
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"kind": 507, "method": "PUT"}))
    with server("bad_line.py", s3, fault) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        from sdflow.store.remote import remote

        monkeypatch.setattr(remote, "TRIES", 1)
        machine = Machine(tmp_path / "cache", url, timeout=5.0)
        record = machine.build(ACTION)
    assert files_of(record) == contents(ACTION)
    assert "nothing is pushed to" in machine.told[0]
    assert len(machine.told) == 1, machine.told
