"""cuBLAS gets small workspaces for sdflow's sessions; what the user set, and what others in the process get, stays."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from sdflow.runtime.sessions.cublas import SMALL, VARIABLE, small_workspaces


def test_small_inside_and_untouched_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with small_workspaces():
        assert os.environ[VARIABLE] == SMALL
    assert VARIABLE not in os.environ


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ":16:8")
    with small_workspaces():
        assert os.environ[VARIABLE] == ":16:8"
    assert os.environ[VARIABLE] == ":16:8"


def test_the_last_of_several_threads_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    together = Barrier(3)

    def load(index: int) -> str | None:
        with small_workspaces():
            together.wait()
        if index:
            together.wait()  # two are out
            return None
        with small_workspaces():
            together.wait()
            return os.environ.get(VARIABLE)

    with ThreadPoolExecutor(3) as pool:
        assert SMALL in set(pool.map(load, range(3)))
    assert VARIABLE not in os.environ
