"""A pass that starts processes leaves none, however it ends and whatever they do to stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from until import until

from sdflow.errors import PassError
from sdflow.processes import worker_server
from sdflow.processes.worker_server import WorkerServer
from sdflow.processes.workers import Start, run_worker, spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux alone")
HOW = ("a fork", "a daemon", "a program")
ENDS = ("returns", "raises", "exits", "is killed")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])])
    )


@pytest.fixture(scope="module")
def server() -> Iterator[WorkerServer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])])
        )
        made = WorkerServer(["numpy"], spawn, lambda worker: None)
    yield made
    made.end()


@pytest.fixture(params=["spawned", "forked"])
def start(request: pytest.FixtureRequest, server: WorkerServer) -> Start:
    assert worker_server.AVAILABLE
    return spawn if request.param == "spawned" else server.fork


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("how", HOW)
def test_a_pass_leaves_no_process(how: str, ends: str, start: Start, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    request = {"do": "leave", "how": how, "end": ends, "pid_file": str(pid_file)}
    if ends == "returns":
        assert run_worker("worker_samples", request, log=tmp_path / "log", start=start).value == ends
    else:
        with pytest.raises(PassError):
            run_worker("worker_samples", request, log=tmp_path / "log", start=start)
    if start is spawn and ends in ("exits", "is killed") and how != "a fork":
        # Out of reach: its parent ended of itself, and no server above takes in orphans. But nobody waits for it.
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    until(lambda: is_gone(int(pid_file.read_text())), "what the pass started is still there")


@pytest.mark.parametrize("how", HOW)
def test_a_pass_that_is_ended_leaves_no_process(how: str, start: Start, tmp_path: Path) -> None:
    """As at a Ctrl-C: what `on_memory`'s thread, or the run, does is to kill the worker."""
    pid_file, workers = tmp_path / "pid", []
    request = {"do": "leave", "how": how, "end": "hangs", "pid_file": str(pid_file)}

    def run() -> None:
        with suppress(PassError):
            run_worker("worker_samples", request, log=tmp_path / "log", start=start, on_start=workers.append)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    workers[0].kill()
    thread.join()
    until(lambda: is_gone(int(pid_file.read_text())), "what the pass started is still there")


PARENT = """
import sys
from pathlib import Path
from sdflow.processes.worker_server import WorkerServer
from sdflow.processes.workers import run_worker, spawn
folder = Path(sys.argv[1])
start = spawn if sys.argv[2] == "spawned" else WorkerServer(["numpy"], spawn, lambda worker: None).fork
request = {"do": "leave", "how": sys.argv[3], "end": "hangs", "pid_file": str(folder / "pid")}
run_worker("worker_samples", request, log=folder / "log", start=start)
"""


@pytest.mark.parametrize("started", ["spawned", "forked"])
@pytest.mark.parametrize("how", HOW)
def test_a_run_that_is_killed_leaves_no_process_of_its_passes(how: str, started: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), started, how]) as parent:
        until(lambda: pid_file.exists() and bool(pid_file.read_text()))
        parent.send_signal(signal.SIGKILL)
    until(lambda: is_gone(int(pid_file.read_text())), "what the pass started is still there")
