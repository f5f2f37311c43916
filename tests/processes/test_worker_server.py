"""Servers that fork workers: what they must never do, and what happens when they cannot start or die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from until import until

from sdflow.errors import PassError
from sdflow.passes.base import BINDS, TRACES
from sdflow.processes import worker_server
from sdflow.processes.worker_group import WorkerGroup
from sdflow.processes.worker_server import NoServerError, WorkerServer
from sdflow.processes.workers import WorkerResult, run_worker, spawn

pytestmark = pytest.mark.skipif(not worker_server.AVAILABLE, reason="forks on Linux only")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])])
    )


@pytest.fixture
def servers(children: Callable[..., list[psutil.Process]]) -> Callable[[], list[psutil.Process]]:
    """Asks for all processes that the test has started."""
    return partial(children, recursive=True)


@pytest.fixture
def group(servers: Callable[[], list[psutil.Process]]) -> Iterator[WorkerGroup]:
    with WorkerGroup(2) as group:
        yield group
    assert servers() == []


@pytest.fixture
def run(group: WorkerGroup, tmp_path: Path) -> Callable[..., WorkerResult]:
    def run(do: str, imported: tuple[tuple[str, ...], ...], **request: Any) -> WorkerResult:
        return group.run(
            "worker_samples",
            {"do": do, **request},
            log=tmp_path / "log",
            on_phase=lambda phrase: None,
            on_memory=lambda resident: None,
            imported=imported,
        )

    return run


def test_the_layers_of_the_passes_are_imported_once_each_by_processes_of_one_thread(
    run: Callable[..., Any], servers: Callable[[], list[psutil.Process]]
) -> None:
    modules = set(run("modules", TRACES).value)
    assert {name for layer in TRACES for name in layer} <= modules
    bottom, graph, top = servers()
    assert (graph.parent(), top.parent()) == (bottom, graph), "each forked from the one below"
    assert [server.num_threads() for server in (bottom, graph, top)] == [1, 1, 1]
    light = set(run("modules", BINDS).value)
    assert not {"torch", "olive", "diffusers", "transformers"} & light, "binding stays light"
    assert servers() == [bottom, graph, top], "no further process, and no worker left, ended or not"
    assert run("echo", BINDS, value=0).peak_memory < run("echo", TRACES, value=0).peak_memory / 3


def test_servers_end_with_the_group(servers: Callable[[], list[psutil.Process]]) -> None:
    with WorkerGroup() as group:
        group._start((("json",), ("numpy",)))
        assert len(running := servers()) == 2
    assert not any(server.is_running() for server in running)


def test_a_server_forks_nothing_once_a_package_has_started_a_thread(
    servers: Callable[[], list[psutil.Process]],
) -> None:
    with pytest.raises(NoServerError, match="importing the packages started 1 thread"):
        WorkerServer(["starts_thread"], spawn, lambda worker: None)
    assert servers() == []


@pytest.mark.parametrize(("layer", "reason"), [("starts_thread", "1 thread"), ("no_such_package", "No module named")])
def test_workers_start_without_a_server_that_cannot_and_the_user_is_told(
    run: Callable[..., WorkerResult], group: WorkerGroup, layer: str, reason: str
) -> None:
    said: list[str] = []
    group._say = said.append
    for _ in range(2):
        assert run("echo", (("json",), (layer,)), value=1).value == 1
    (told,) = said
    assert layer in told
    assert reason in told


def test_a_package_that_remembers_the_servers_home_leaves_nothing_there(run: Callable[..., WorkerResult]) -> None:
    with pytest.raises(PassError, match="NotADirectoryError"):
        run("write where the server was at home", (("keeps_home",),))


def test_a_killed_server_takes_its_workers_along_and_is_reported(
    tmp_path: Path, servers: Callable[[], list[psutil.Process]]
) -> None:
    server = WorkerServer(["json"], spawn, lambda worker: None)
    (process,) = servers()
    started: list[psutil.Process] = []

    def kill_server(phrase: str) -> None:
        started.extend(process.children())
        process.send_signal(signal.SIGKILL)

    request = {"do": "announce and hang"}
    with pytest.raises(PassError, match="SIGKILL"):
        run_worker("worker_samples", request, log=tmp_path / "log", on_phase=kill_server, start=server.fork)
    (worker,) = started
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(PassError, match="the process that starts workers was killed"):
        run_worker("worker_samples", request, log=tmp_path / "log", start=server.fork)
    server.end()
