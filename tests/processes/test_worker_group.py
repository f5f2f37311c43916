"""Whose turn it is."""

from __future__ import annotations

import threading

import pytest
from until import PATIENCE, until

from sdflow.processes.worker_group import GroupEndedError, WorkerGroup


def waiting(
    group: WorkerGroup, lefts: list[int], went: list[int], sizes: dict[int, int] | None = None
) -> list[threading.Thread]:
    """Threads that wait for a turn, one for each number of workers that are left; sizes: one worker left, and these bytes."""

    def wait(left: int) -> None:
        rank = {"left": left} if sizes is None else {"left": 1, "size": sizes[left]}
        try:
            with group.turn(heavy=False, **rank):
                went.append(left)
        except GroupEndedError:
            return

    threads = [threading.Thread(target=wait, args=(left,)) for left in lefts]
    for thread in threads:
        thread.start()
    until(lambda: len(group._waiting) == len(lefts))
    return threads


def test_of_those_that_wait_the_longest_chain_goes_first() -> None:
    group, went = WorkerGroup(1), list[int]()
    with group.turn(heavy=False):
        threads = waiting(group, [2, 7, 1, 4], went)
    for thread in threads:
        thread.join(PATIENCE)
    assert went == [7, 4, 2, 1]


def test_of_equally_long_chains_the_one_with_the_most_to_write_goes_first() -> None:
    group, went = WorkerGroup(1), list[int]()
    with group.turn(heavy=False):
        threads = waiting(group, [0, 1, 2], went, sizes={0: 250, 1: 5100, 2: 1400})
    for thread in threads:
        thread.join(PATIENCE)
    assert went == [1, 2, 0]


def test_whoever_gives_up_holds_up_nobody() -> None:
    group, went = WorkerGroup(1), list[int]()
    with group.turn(heavy=False):
        threads = waiting(group, [7, 2], went)
        group.end()
        for thread in threads:
            thread.join(PATIENCE)
    assert went == []
    assert group._waiting == []
    with pytest.raises(GroupEndedError), group.turn(heavy=False):
        pass
