"""Workers, spawned and forked: whatever happens in one stays there, and ends with its parent."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from until import PATIENCE, until

from sdflow.errors import PassError
from sdflow.processes import worker_server
from sdflow.processes.worker_server import WorkerServer
from sdflow.processes.workers import Start, WorkerResult, run_worker, spawn

Run = Callable[..., WorkerResult]


FORKED = pytest.param("forked", marks=pytest.mark.skipif(not worker_server.AVAILABLE, reason="forks on Linux only"))


@pytest.fixture(params=["spawned", FORKED])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])])
    )
    if request.param == "spawned":
        yield spawn
        return
    server = WorkerServer(["numpy", "psutil"], spawn, lambda worker: None)
    yield server.fork
    server.end()


@pytest.fixture
def run(tmp_path: Path, start: Start) -> Run:
    def run(do: str, on_phase: Callable[[str], None] = lambda phrase: None, **request: Any) -> WorkerResult:
        log = tmp_path / "log"
        return run_worker("worker_samples", {"do": do, **request}, log=log, on_phase=on_phase, start=start)

    return run


def test_a_result_comes_back_with_its_phases_and_prints_go_to_the_log(run: Run, tmp_path: Path) -> None:
    phases: list[str] = []
    assert run("echo", phases.append, value={"counts": [1, 2.5, None]}).value == {"counts": [1, 2.5, None]}
    assert phases == ["echoing"]
    assert (tmp_path / "log").read_text() == "this goes to the log\n"


def test_an_error_of_sdflow_keeps_its_class_place_and_remedy(run: Run) -> None:
    with pytest.raises(PassError) as caught:
        run("refuse")
    assert (caught.value.what, caught.value.where, caught.value.remedy) == ("no such weight", "unet", "name another")


def test_any_other_exception_is_a_pass_error_with_its_traceback(run: Run) -> None:
    with pytest.raises(PassError, match="KeyError: 'missing'") as caught:
        run("bug")
    assert "worker_samples.py" in str(caught.value.remedy)


def test_a_full_disk_is_told_apart_from_a_failed_pass(run: Run) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        run("fill the disk")
    assert caught.value.errno == errno.ENOSPC


def test_a_limit_of_the_file_size_is_told_apart_from_a_failed_pass(run: Run) -> None:
    with pytest.raises(OSError, match="File too large") as caught:
        run("reach the file size limit")
    assert caught.value.errno == errno.EFBIG


def test_a_killed_worker_is_reported_by_its_signal(run: Run) -> None:
    with pytest.raises(PassError, match="SIGKILL, most likely because memory ran out"):
        run("die")


def test_a_worker_that_exits_without_a_result_is_an_error(run: Run) -> None:
    with pytest.raises(PassError, match="ended with status 7 and no result"):
        run("exit")


def test_peak_memory_is_the_workers_own(run: Run) -> None:
    small = run("echo", value=0).peak_memory
    large = run("allocate", bytes=200_000_000).peak_memory
    assert 180_000_000 < large - small < 260_000_000
    assert abs(run("echo", value=0).peak_memory - small) < 20_000_000, "nothing of the one before"


def test_a_worker_sees_nothing_of_the_one_before(run: Run) -> None:
    before = run("look").value
    assert run("change everything").value != before
    assert run("look").value == before


def test_a_large_request_and_a_large_result_arrive_whole(run: Run) -> None:
    value = ["0123456789"] * 100_000
    assert run("echo", value=value).value == value


def test_the_environment_is_clean(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    environment = run("environment").value
    assert "HF_TOKEN" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "HTTPS_PROXY" not in environment
    assert environment["ORT_DISABLE_TELEMETRY"] == environment["OLIVE_DISABLE_TELEMETRY"] == environment["CI"] == "1"


def test_a_worker_can_be_given_variables_of_its_own(run: Run, start: Start, tmp_path: Path) -> None:
    own = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}
    log = tmp_path / "log"
    found = run_worker("worker_samples", {"do": "environment"}, log=log, environment=own, start=start).value
    assert found["GLIBC_TUNABLES"] == own["GLIBC_TUNABLES"]
    assert "GLIBC_TUNABLES" not in run("environment").value


def test_a_worker_writes_into_no_home_directory(run: Run) -> None:
    home = Path(run("write home").value)
    assert home != Path.home()
    assert not home.exists(), "its home is removed with it"


def test_a_worker_reaches_no_network(run: Run) -> None:
    with pytest.raises(PassError, match=r"tried to look up the host 'example.com'"):
        run("look up")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PassError, match="tried to"):
        run("connect", port=server.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_ends_with_its_parent(
    tmp_path: Path, start: Start, number: signal.Signals, interruptible: None
) -> None:
    pid_file = tmp_path / "pid"
    request = {"do": "hang", "pid_file": str(pid_file)}
    forked = "WorkerServer(['numpy'], spawn, lambda worker: None).fork"
    code = (
        "from pathlib import Path; from sdflow.processes.workers import run_worker, spawn\n"
        "from sdflow.processes.worker_server import WorkerServer\n"
        f"run_worker('worker_samples', {request!r}, log=Path({str(tmp_path / 'log')!r}),"
        f" start={'spawn' if start is spawn else forked})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until(lambda: pid_file.exists() and pid_file.read_text() != "")
    started = psutil.Process(parent.pid).children(recursive=True)
    assert int(pid_file.read_text()) in [process.pid for process in started]
    parent.send_signal(number)
    parent.wait(PATIENCE)
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started))
