"""Many processes on one action."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from until import PATIENCE, until

from sdflow.store import Cache

from .builds import assert_complete, build, contents, make_action, names
from .faults import finish, in_process, start


def _built(folder: Path) -> list[str]:
    """The processes that said they built, each by a file of its own."""
    return names(folder)


def test_many_processes_on_one_action_build_once_and_agree(cache: Cache, tmp_path: Path) -> None:
    action = make_action()
    log, said = tmp_path / "built", tmp_path / "digests"
    log.mkdir()
    said.mkdir()

    def work() -> None:
        record = build(Cache(cache.root), action, built=lambda: (log / str(os.getpid())).touch(), seconds=0.3)
        assert_complete(record, contents(action))
        (said / str(os.getpid())).write_text(record.artifact.digest)

    for child in [start(work) for _ in range(8)]:
        assert finish(child)
    assert len(_built(log)) == 1
    assert len(names(said)) == 8
    assert len({path.read_text() for path in said.iterdir()}) == 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_without_the_lock_many_processes_still_agree(cache: Cache, tmp_path: Path, deterministic: bool) -> None:
    """Correctness does not rest on the lock: whoever loses throws its copy away, even if it came out different."""
    action = make_action()
    said = tmp_path / "digests"
    said.mkdir()
    together = multiprocessing.get_context("fork").Barrier(8)

    def work() -> None:
        mine = Cache(cache.root)
        assert mine.lookup(action) is None
        with mine.staging(action) as staging:
            (staging.files / "model.onnx").write_bytes(b"same" if deterministic else os.urandom(50_000))
            together.wait(PATIENCE)
            record = staging.publish({"process": os.getpid()}, {})
        (said / str(os.getpid())).write_text(f"{record.artifact.digest} {record.facts['process']}")

    for child in [start(work) for _ in range(8)]:
        assert finish(child)
    assert len(names(said)) == 8
    (answer,) = {path.read_text() for path in said.iterdir()}
    record = cache.lookup(action)
    assert record is not None
    assert answer == f"{record.artifact.digest} {record.facts['process']}"
    assert cache.verify().damaged == ()
    assert names(cache.root / "v1/staging") == []
    cache.gc()
    assert len(list((cache.root / "v1/objects").glob("*/*"))) == 1


def test_different_actions_with_one_output_published_at_once_share_it(cache: Cache) -> None:
    together = multiprocessing.get_context("fork").Barrier(6)

    def work(number: int) -> None:
        with Cache(cache.root).staging(make_action(str(number))) as staging:
            (staging.files / "model.onnx").write_bytes(b"same" * 10_000)
            together.wait(PATIENCE)
            staging.publish({}, {})

    for child in [start(lambda number=number: work(number)) for number in range(6)]:
        assert finish(child)
    found = [cache.lookup(make_action(str(number))) for number in range(6)]
    assert len({record.artifact.digest for record in found if record is not None}) == 1
    assert None not in found


def test_a_process_that_waits_says_so_and_one_that_dies_lets_go(cache: Cache, tmp_path: Path) -> None:
    action = make_action()
    ready, seen = tmp_path / "ready", tmp_path / "seen"

    def hold_and_die() -> None:
        with Cache(cache.root).lock(action):
            ready.touch()
            until(seen.exists)
            os.kill(os.getpid(), 9)

    child = start(hold_and_die)
    until(ready.exists)
    waited: list[str] = []

    def waiting() -> None:
        waited.append("waiting")
        seen.touch()

    with cache.lock(action, waiting):
        assert waited == ["waiting"]
    with cache.lock(action, lambda: waited.append("again")):
        pass
    assert waited == ["waiting"]
    assert not finish(child)


def test_actions_do_not_wait_for_each_other(cache: Cache) -> None:
    with cache.lock(make_action("a")):

        def other() -> None:
            with Cache(cache.root).lock(make_action("b"), lambda: pytest.fail("it waited")):
                pass

        assert in_process(other)
