"""A killed process leaves no bad entry: at every single file operation, and at random moments over many workers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sdflow.artifact import Action
from sdflow.disk.atomic_write import UNFINISHED
from sdflow.store import Cache
from sdflow.store.layout import remove_tree

from .builds import assert_complete, build, contents, make_action, names, publish
from .faults import finish, in_process, killed_before_file_event, start


@pytest.fixture
def cache(memory_path: Path) -> Cache:
    return Cache(memory_path / "cache")


ACTIONS = tuple(make_action(str(number)) for number in range(6))


def assert_nothing_broken(root: Path, actions: Sequence[Action] = ACTIONS) -> None:
    """Every entry verifies, every action can be built, and one collection removes every trace of the dead."""
    cache = Cache(root)
    report = cache.verify()
    assert report.damaged == ()
    for action in actions:
        assert_complete(build(cache, action), contents(action))
    cache.gc()
    for folder in ("staging", "trash", "leases", "quarantine"):
        assert [name for name in names(root / "v1" / folder) if not name.endswith(UNFINISHED)] == []  # young ones stay
    assert {entry.action for entry in cache.entries()} >= {action.digest for action in actions}


MOST = [12, pytest.param(1, marks=pytest.mark.slow)]
"""Operations from one kill to the next: up to twelve, other ones in each run. With 1, every operation is tried."""


@pytest.mark.parametrize("most", MOST)
def test_killed_at_any_step_of_a_build_leaves_no_bad_entry(cache: Cache, most: int) -> None:
    action = ACTIONS[0]
    operation = kills = 0
    while not killed_before_file_event(operation, lambda: build(Cache(cache.root), action)):
        kills += 1
        operation += random.randint(1, most)
        found = Cache(cache.root).lookup(action)
        if found is not None:
            assert_complete(found, contents(action))
        assert Cache(cache.root).verify().damaged == ()
        if kills % 10 == 0:
            assert_nothing_broken(cache.root, [action])
        remove_tree(cache.root)
    assert kills > 50 // most - 1
    assert_nothing_broken(cache.root, [action])


def _interrupted(
    cache: Cache, template: Path, most: int, work: Callable[[Cache], object], check: Callable[[], None]
) -> int:
    """Kill `work` before one file operation after the other, on a copy of `template` each time. Returns how often."""
    operation = kills = 0
    while True:
        remove_tree(cache.root)
        shutil.copytree(template, cache.root)
        ended = killed_before_file_event(operation, lambda: work(Cache(cache.root)))
        check()
        if ended:
            return kills
        kills += 1
        operation += random.randint(1, most)


@pytest.fixture
def filled(memory_path: Path) -> Path:
    """A cache with four entries, an orphan, a dead build and trash."""
    cache = Cache(memory_path / "template")
    for action in ACTIONS[:4]:
        publish(cache, action)
    cache.forget(ACTIONS[3])

    def die() -> None:
        with cache.staging(ACTIONS[4]) as staging:
            (staging.files / "model.onnx").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    assert not in_process(die)
    (cache.root / "v1/trash/old").mkdir()
    cache.stat.close()
    return cache.root


@pytest.mark.parametrize("most", MOST)
def test_killed_at_any_step_of_a_collection_leaves_no_bad_entry(cache: Cache, filled: Path, most: int) -> None:
    def check() -> None:
        reader = Cache(cache.root)
        for action in ACTIONS[:4]:
            record = reader.lookup(action)
            if record is not None:
                reader.check(record.artifact)
        assert reader.verify().damaged == ()

    assert _interrupted(cache, filled, most, lambda cache: cache.gc(45_000), check) > 50 // most
    assert len(cache.entries()) == 2
    assert_nothing_broken(cache.root)


@pytest.mark.parametrize("most", MOST)
def test_a_clean_killed_at_any_step_leaves_a_cache_that_works(cache: Cache, filled: Path, most: int) -> None:
    def check() -> None:
        assert Cache(cache.root).verify().damaged == ()
        assert_complete(build(Cache(cache.root), ACTIONS[0]), contents(ACTIONS[0]))

    assert _interrupted(cache, filled, most, lambda cache: cache.clean(), check) > 50 // most
    cache.clean()
    assert cache.entries() == []
    assert names(cache.root / "v1/objects") == names(cache.root / "v1/staging") == names(cache.root / "v1/trash") == []
    assert_nothing_broken(cache.root)


@pytest.mark.parametrize("most", [15, pytest.param(110, marks=pytest.mark.slow)])
def test_many_kills_over_many_workers_leave_no_bad_entry(cache: Cache, most: int) -> None:
    """Workers build, read, forget and collect at once, on few actions; one after another dies at a random moment.

    A worker that ever sees a hit with wrong content, or an error, fails, and the test with it.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def work(worker: int, seed: int) -> None:
        mine = random.Random(seed)
        cache = Cache(cache_root)
        while True:
            action = mine.choice(ACTIONS)
            roll = mine.random()
            if roll < 0.1:
                cache.gc(mine.choice([None, 0, 60_000]))
            elif roll < 0.2:
                cache.forget(action)
            elif roll < 0.25:
                assert cache.verify().damaged == ()
            else:
                with cache.lease():
                    record = build(cache, action, locked=mine.random() < 0.5)
                    cache.check(record.artifact)
                    assert_complete(record, contents(action))
                    cache.notes.remember_step(f"worker{worker}", action)

    cache_root = cache.root

    def begin(worker: int) -> tuple[int, int]:
        seed = chance.randrange(1 << 32)
        return start(lambda: work(worker, seed))

    workers = [begin(number) for number in range(5)]
    kills = 0
    while kills < most:
        time.sleep(chance.uniform(0.0, 0.12))
        number = chance.randrange(len(workers))
        os.kill(workers[number][0], signal.SIGKILL)
        assert not finish(workers[number]), "a worker ended by itself"
        kills += 1
        workers[number] = begin(number)
    for child in workers:
        os.kill(child[0], signal.SIGKILL)
        assert not finish(child), "a worker ended by itself"
        kills += 1
    assert kills == most + len(workers)
    assert names(cache.root / "v1/quarantine") == [], "a kill made a damaged entry"
    assert_nothing_broken(cache.root)
