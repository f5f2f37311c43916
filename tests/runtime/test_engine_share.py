"""Engines travel through a remote cache from one machine to the next of its kind, and to no other. The remote is a folder."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from shell import Shell
from started_python import StartedPython

from sdflow.artifact import Action
from sdflow.errors import CacheError
from sdflow.runtime.sessions import engine_cache
from sdflow.runtime.sessions.engine_cache import MIGRAPHX, TENSORRT, Profile, engine_folders, machine_key
from sdflow.runtime.sessions.engine_share import (
    ON_THE_WAY,
    TRUST_VARIABLE,
    Moved,
    engine_action,
    fetch_engines,
    has_engines,
    pull_engines,
    push_engines,
    push_folder,
    remote_of_engines,
)
from sdflow.runtime.sessions.kept_engines import kept_engines
from sdflow.store import Cache
from sdflow.store.copying import Copied, copy_entries
from sdflow.store.remote.spec import RemoteSpec
from sdflow.store.signing import make_key
from sdflow.targets import TARGETS

SHAPES = {"sample": (2, 4, 64, 64)}
ENGINE = bytes(range(256)) * 400
BUILT = {"seconds": 0.0, "peak_memory": 0, "finished": "2026-11-26T10:00:00+00:00"}
Make = Callable[..., Path]


@pytest.fixture
def remote(tmp_path: Path) -> RemoteSpec:
    return RemoteSpec(str(tmp_path / "remote"), push=True)


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """The folder of a model's engines on a machine, with files in it if asked."""

    def make(home: str, model: str = "a" * 64, files: bool = True, target: str = "tensorrt") -> Path:
        provider = TENSORRT if target == "tensorrt" else MIGRAPHX
        folder = engine_folders(tmp_path / home, TARGETS[target], provider, model, Profile.of(SHAPES)).engines
        if files:
            (folder / "context").mkdir()
            (folder / "graph_sm90.engine").write_bytes(ENGINE)
            (folder / "context" / "model.onnx").write_bytes(b"points to what is beside it")
        return folder

    return make


@dataclass
class TrustingShell(Shell):
    """trust: whose engines its environment says to take."""

    trust: str = ""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), TRUST_VARIABLE: self.trust}


def files_of(folder: Path) -> dict[str, str]:
    """Name -> digest of its content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def on_the_way(home: Path) -> list[Path]:
    return list((home / ON_THE_WAY).glob("v1/objects/*/*"))


def test_an_engine_arrives_as_it_was_and_is_found_by_the_key(made: Make, remote: RemoteSpec, tmp_path: Path) -> None:
    here, there = made("one"), made("other", files=False)
    assert push_folder(here, remote)
    assert not has_engines(there)
    assert fetch_engines(there, remote)
    assert files_of(there) == files_of(here)
    assert not fetch_engines(there, remote), "what is there is not fetched again"
    for home in ("one", "other"):
        assert on_the_way(tmp_path / home) == [], "nothing is kept twice"


def test_another_model_or_machine_gets_none(
    made: Make, remote: RemoteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = made("one")
    push_folder(here, remote)
    assert not fetch_engines(made("other", "b" * 64, files=False), remote)
    monkeypatch.setattr(engine_cache, "driver_version", lambda: "999.1")
    newer = made("other", files=False)
    assert newer.parent.name != here.parent.name
    assert not fetch_engines(newer, remote)
    assert pull_engines(tmp_path / "other", remote, [machine_key(TENSORRT)]) == Moved(0, 0, 1)
    assert not has_engines(newer)


def test_all_of_a_machine_are_pulled_at_once(made: Make, remote: RemoteSpec, tmp_path: Path) -> None:
    first, second, program = made("one"), made("one", "b" * 64), made("one", target="rocm")
    assert push_engines(tmp_path / "one", remote) == Moved(3, 0)
    assert push_engines(tmp_path / "one", remote) == Moved(0, 3)
    assert pull_engines(tmp_path / "other", remote, [machine_key(TENSORRT)]) == Moved(2, 0, 1)
    for folder in (first, second):
        copy = tmp_path / "other" / folder.relative_to(tmp_path / "one")
        assert files_of(copy) == files_of(folder)
        assert copy == made("other", "a" * 64 if folder == first else "b" * 64, files=False), "where it is looked for"
    assert not (tmp_path / "other" / program.relative_to(tmp_path / "one")).exists()
    assert pull_engines(tmp_path / "other", remote, [machine_key(TENSORRT)]) == Moved(0, 2, 1)


def test_a_folder_that_says_to_be_another_machines_is_not_taken(made: Make, tmp_path: Path) -> None:
    """Engines that somebody has copied by hand, or whose description was altered."""
    folder = made("one")
    key = json.loads((folder.parent / "machine.json").read_text())
    (folder.parent / "machine.json").write_text(json.dumps({**key, "device": "NVIDIA H100"}))
    assert push_engines(tmp_path / "one", RemoteSpec(str(tmp_path / "remote"), push=True)) == Moved(0, 0)
    assert not has_engines(made("one", files=False))
    assert json.loads((folder.parent / "machine.json").read_text()) == key
    (made("one") / "model.json").write_text("{")
    assert not has_engines(made("one", files=False))


def test_a_damaged_engine_does_not_arrive(made: Make, remote: RemoteSpec, caplog: pytest.LogCaptureFixture) -> None:
    push_folder(made("one"), remote)
    pieces = [path for path in Path(remote.url).rglob("pieces/*/*") if path.stat().st_size == len(ENGINE)]
    (piece,) = pieces
    piece.chmod(0o600)
    piece.write_bytes(ENGINE[:-1] + b"!")
    there = made("other", files=False)
    assert not fetch_engines(there, remote)
    assert set(files_of(there)) == {"model.json"}
    assert caplog.text


def test_files_of_an_entry_stay_in_their_folder(made: Make, remote: RemoteSpec, tmp_path: Path) -> None:
    """Whoever may write to the remote may not replace the description of a folder, or add what is hidden."""
    there = made("other", files=False)
    before = files_of(there)
    machine, model = (json.loads((there / name).read_text()) for name in ("../machine.json", "model.json"))
    cache = Cache(tmp_path / "hostile", remote=remote)
    action = engine_action(machine, model)
    with cache.staging(action) as staging:
        for name in ("model.json", ".context-1-aa/model.onnx", "real.engine"):
            (staging.files / name).parent.mkdir(exist_ok=True)
            (staging.files / name).write_bytes(b"hostile")
        staging.publish({}, BUILT)
    copy_entries(cache, [action], up=True)
    assert fetch_engines(there, remote)
    assert files_of(there) == {**before, "real.engine": hashlib.sha256(b"hostile").hexdigest()}


def test_entries_of_strange_forms_are_passed_over(remote: RemoteSpec, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "hostile", remote=remote)
    strange: list[dict[str, Any]] = [
        {"engine": 1, "machine": {"provider": "../../x"}, "model": {}},
        {"engine": 1, "machine": [], "model": {}},
        {"engine": 2, "machine": {"provider": TENSORRT}, "model": {}},
        {"engine": 1, "machine": {"provider": TENSORRT}, "model": {}, "more": 1},
    ]
    for content in strange:
        action = Action(content)
        with cache.staging(action) as staging:
            (staging.files / "x").write_bytes(json.dumps(content).encode())
            staging.publish({}, BUILT)
        copy_entries(cache, [action], up=True)
    machines = [content["machine"] for content in strange]
    assert pull_engines(tmp_path / "other", remote, machines) == Moved(0, 0, 0)
    assert not list((tmp_path / "other").glob("tensorrt*"))


def test_only_signed_engines_are_taken_where_signers_are_named(
    made: Make, remote: RemoteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = make_key(tmp_path / "key")
    trusting = RemoteSpec(remote.url, push=True, trust=(public,))
    push_folder(made("one"), remote)
    assert not fetch_engines(made("other", files=False), trusting), "nobody has signed it"
    monkeypatch.setenv("SDFLOW_SIGNING_KEY", str(tmp_path / "key"))
    push_folder(made("signing"), remote)
    assert fetch_engines(made("other", files=False), trusting)


@pytest.mark.parametrize(
    ("environment", "trust"),
    [
        ({}, None),
        ({"SDFLOW_REMOTE_CACHE": "/cache"}, None),
        ({"SDFLOW_REMOTE_CACHE": "/cache", TRUST_VARIABLE: ""}, None),
        ({TRUST_VARIABLE: "anybody"}, None),
        ({"SDFLOW_REMOTE_CACHE": "/cache", TRUST_VARIABLE: "anybody"}, ()),
        ({"SDFLOW_REMOTE_CACHE": "/cache", TRUST_VARIABLE: "a.pub b.pub"}, ("a.pub", "b.pub")),
    ],
)
def test_nothing_is_fetched_unless_it_is_said_whose_to_take(environment: dict[str, str], trust: Any) -> None:
    found = remote_of_engines(environment)
    assert (None if found is None else found.trust) == trust


def test_a_remote_that_cannot_be_used_ends_a_command_and_no_session(made: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    broken = RemoteSpec(str(tmp_path / "file" / "x"), push=True)
    assert not fetch_engines(made("one", files=False), broken)
    assert not push_folder(made("other"), broken)
    assert on_the_way(tmp_path / "other") == [], "nothing stays of a push that failed"
    with pytest.raises(CacheError):
        pull_engines(tmp_path / "other", broken, [])


def test_the_command_pushes_and_pulls(started_python: StartedPython | None, made: Make, tmp_path: Path) -> None:
    """This machine has no provider that keeps engines, so that none are its own."""
    shell = TrustingShell(tmp_path, started_python)
    made("home/.cache/sdflow/engines")
    for wrong, told in (
        (("--push", "--trust", "a.pub", "--url", "shared"), "requires --pull"),
        (("--trust", "a.pub"), "requires --pull"),
        (("--url", "shared"), "requires --push or --pull"),
        (("--pull", "--url", "shared"), "no trusted signer is named"),
    ):
        refused = shell.run("cache", "engines", *wrong)
        assert refused.returncode == 2 and told in refused.stderr, refused.stderr
    done = shell.run("cache", "engines", "--push", "--url", "shared")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("1 engines pushed to ") and done.stdout.endswith("0 were already there\n")
    shell.trust = "anybody"
    pulled = json.loads(shell.run("cache", "engines", "--pull", "--url", "shared", "--json").stdout)
    assert (pulled["engines"], pulled["there"], pulled["pushed"]) == (0, pulled["there"], False)
    assert pulled["there"] + pulled["others"] == 1


def test_two_processes_that_fetch_one_engine_agree(made: Make, remote: RemoteSpec, tmp_path: Path) -> None:
    here, there = made("one"), made("other", files=False)
    push_folder(here, remote)
    code = (
        "import sys; from pathlib import Path; from sdflow.runtime.sessions.engine_share import fetch_engines;"
        "from sdflow.store.remote.spec import RemoteSpec; fetch_engines(Path(sys.argv[1]), RemoteSpec(sys.argv[2]))"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(there), remote.url]) for _ in range(2)]
    assert [each.wait(60) for each in started] == [0, 0]
    assert files_of(there) == files_of(here)
    assert not [each.name for each in there.parent.iterdir() if each.name.startswith(".")]


def test_two_processes_that_push_the_same_engines_leave_each_others_alone(
    made: Make, remote: RemoteSpec, tmp_path: Path
) -> None:
    folders = [made("one", letter * 64) for letter in "abcdef"]
    code = (
        "import sys; from pathlib import Path; from sdflow.runtime.sessions.engine_share import push_engines;"
        "from sdflow.store.remote.spec import RemoteSpec;"
        "moved = push_engines(Path(sys.argv[1]), RemoteSpec(sys.argv[2], push=True)); print(moved.engines, moved.there)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "one"), remote.url]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [list(map(int, each.communicate(timeout=60)[0].split())) for each in started]
    assert [sum(each) for each in told] == [len(folders)] * 2
    assert sum(engines for engines, _ in told) == len(folders)
    assert on_the_way(tmp_path / "one") == []
    assert pull_engines(tmp_path / "other", remote, [machine_key(TENSORRT)]) == Moved(len(folders), 0)


def test_devices_of_plugins_are_listed_with_their_drivers_and_clearing_leaves_nothing_on_the_way(
    tmp_path: Path,
) -> None:
    root = tmp_path / "home" / ".cache" / "sdflow" / "engines"
    for name, told in (("a", {"Description": "A GPU", "vendor": "V"}), ("b", {"vendor": "V", "Description": ""})):
        (root / f"x-{name}").mkdir(parents=True)
        machine = {"provider": "XExecutionProvider", "drivers": ["One 1.2", "Two 3"], **told}
        (root / f"x-{name}" / "machine.json").write_text(json.dumps(machine))
    assert sorted((each.device, each.driver) for each in kept_engines(root)) == [
        ("A GPU", "One 1.2, Two 3"), ("V", "One 1.2, Two 3"),
    ]  # fmt: skip
    cache = Cache(root / ON_THE_WAY)
    with cache.staging(Action({"engine": 1})) as staging:
        (staging.files / "x").write_bytes(ENGINE)
        staging.publish({}, BUILT)
    assert Shell(tmp_path).run("cache", "engines", "--clear", "--yes").returncode == 0
    assert kept_engines(root) == [] and on_the_way(root) == []


def test_a_passage_that_ends_elsewhere_removes_nothing_of_this_one(
    made: Make, remote: RemoteSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each passage empties the folder on the way at its end, here at the worst moments of another."""

    def meanwhile(cache: Cache, actions: list[Action], *, up: bool) -> Copied:
        Cache(cache.root).gc(0)
        copied = copy_entries(cache, actions, up=up)
        Cache(cache.root).gc(0)
        return copied

    monkeypatch.setattr("sdflow.runtime.sessions.engine_share.copy_entries", meanwhile)
    here, there = made("one"), made("other", files=False)
    assert push_engines(tmp_path / "one", remote) == Moved(1, 0)
    assert fetch_engines(there, remote)
    assert files_of(there) == files_of(here)
    assert pull_engines(tmp_path / "third", remote, [machine_key(TENSORRT)]) == Moved(1, 0)
    assert on_the_way(tmp_path / "one") == []
