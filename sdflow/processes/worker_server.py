"""Fork workers from a process that has already imported their packages. Linux only: elsewhere each worker is spawned.

torch, olive and diffusers take seconds to import, and every step of a build has its own process. A server imports a
kind of step's packages once per run, and forks a worker for each step. This is as safe as a new process because:

- The server only imports. It runs no pass, loads no user script, and has a single thread whenever it forks.
- A worker has its own environment, home, current folder, session and descriptors, like a spawned one.
- A worker is killed when its line closes, because the run ended or died, and when the server dies.

Servers are stacked: packages come in layers, and a layer's server is forked from the one below. So nothing is imported
twice, and a worker holds only the packages of its layer and those below.

A server has a socket as standard input, and receives over it a byte per worker with four descriptors: the worker's
standard input, output and error, and its line. The line carries the request; the server answers on it with the process
id and, at the end, with the exit status.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sdflow.disk.locked_folder import scratch_folder
from sdflow.errors import PassError
from sdflow.processes.in_worker import deny_network
from sdflow.processes.process_tree import adopt_orphans, kill_descendants, kill_session
from sdflow.processes.workers import SIDE_BY_SIDE, Descriptors, Start, Worker, clean_environment

AVAILABLE = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
READY = "ready"


class NoServerError(Exception):
    """A server could not start; `str()` is the reason. Workers can start without it."""


class WorkerServer:
    """The run's side of a server. `fork` starts a worker, and is a `Start` like `sdflow.processes.workers.spawn`."""

    def __init__(self, modules: Sequence[str], start: Start, on_start: Callable[[Worker], None]) -> None:
        """Start a server that has imported `modules`, using `start`: spawned, or forked from another server.

        on_start: called with its process; if it raises, the server is ended. Raises NoServerError.
        """
        self._scratch = ExitStack()
        folder = self._scratch.enter_context(scratch_folder("server"))
        home, log = folder / "home", folder / "log.txt"
        home.mkdir()
        self._control, theirs = socket.socketpair()
        with theirs, log.open("wb") as sink:
            descriptors = (theirs.fileno(), sink.fileno(), sink.fileno())
            self._process = start(__name__, modules, SIDE_BY_SIDE | clean_environment(home), home, descriptors)
        try:
            on_start(self._process)
            with self._control.makefile("r") as answers:
                said = answers.readline().strip()
            if said != READY:
                last = log.read_text(errors="replace").strip().split("\n")[-1]
                raise NoServerError(said or last or f"it ended with status {self._process.wait()}")
        except BaseException:
            self.end()
            raise

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        home: Path,
        descriptors: Descriptors,
    ) -> Worker:
        """Start `python -m module` in a fork of the server. Raises PassError if the server is gone."""
        line, theirs = socket.socketpair()
        request = {"module": module, "arguments": list(arguments), "environment": dict(environment), "home": str(home)}
        try:
            with theirs:
                socket.send_fds(self._control, [b"\n"], [*descriptors, theirs.fileno()])
            return _ForkedWorker(line, json.dumps(request))
        except OSError as cause:
            line.close()
            raise PassError("the process that starts workers was killed", remedy="Run it again.") from cause

    def end(self) -> None:
        """End the server with its workers, and wait for that."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._scratch.close()


class _ForkedWorker:
    """A worker forked by a server. Only the server kills it, since only the server knows whether the pid is still its
    own."""

    def __init__(self, line: socket.socket, request: str) -> None:
        self._line = line
        self._status: int | None = None
        line.sendall(request.encode() + b"\n")
        self._answers = line.makefile("r")
        said = self._answers.readline()
        if not said:
            raise ConnectionResetError
        self.pid = int(said)

    def kill(self) -> None:
        try:
            self._line.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the other end is closed, so it has ended

    def wait(self) -> int:
        if self._status is None:
            said = self._answers.readline()
            self._status = int(said) if said else -signal.SIGKILL  # the server died, and the worker with it
            self._answers.close()
            self._line.close()
        return self._status


@dataclass(frozen=True)
class _Child:
    """A worker, as its server sees it. ended: a descriptor that becomes readable when the process has ended."""

    pid: int
    ended: int
    line: socket.socket


def serve(modules: Sequence[str]) -> NoReturn:
    """The server's loop: import the modules, then fork a worker for each request until the socket closes."""
    control = socket.socket(fileno=os.dup(0))
    deny_network()
    adopt_orphans()
    importlib.import_module("psutil")  # import it now, so that no worker's end waits for it
    for module in modules:
        importlib.import_module(module)
    control.sendall(f"{_prepare_to_fork()}\n".encode())
    poller = select.poll()
    poller.register(control, select.POLLIN)
    running: dict[int, _Child] = {}  # by the descriptor of its end
    wanted: dict[int, _Child] = {}  # by the descriptor of its line
    while True:
        found = poller.poll()[0][0]  # one at a time: handling it may close others
        if found == control.fileno():
            message, descriptors, _, _ = socket.recv_fds(control, 1, 4)
            if not message:
                kill_descendants(os.getpid())
                os._exit(0)
            child = _fork(descriptors, control, running.values())
            running[child.ended] = wanted[child.line.fileno()] = child
            poller.register(child.ended, select.POLLIN)
            poller.register(child.line, select.POLLRDHUP)
        elif found in wanted:
            kill_session(wanted.pop(found).pid)
            poller.unregister(found)
        else:
            child = running.pop(found)
            poller.unregister(found)
            if wanted.pop(child.line.fileno(), None):
                poller.unregister(child.line)
            kill_session(child.pid)  # remaining processes of its group
            _, status = os.waitpid(child.pid, 0)
            kill_descendants(
                os.getpid(), spare=[each.pid for each in running.values()]
            )  # and its orphans, which this process adopted
            with child.line, suppress(BrokenPipeError):
                child.line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(child.ended)


def _prepare_to_fork() -> str:
    """Prepare after the imports. Returns READY, or why this process must not fork."""
    home = Path.home()
    shutil.rmtree(home)
    home.touch()  # so that a library that kept the path cannot leave files for the next worker
    gc.collect()
    gc.freeze()  # keeps workers' collections from unsharing the packages' pages
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)  # OpenBLAS starts threads on import, ends them at a fork, restarts them on use
    end = time.monotonic() + 1
    while thread_count() > 1:  # ended threads may linger
        if time.monotonic() > end:
            return f"importing the packages started {thread_count() - 1} threads"
        time.sleep(0.01)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as cause:
        return f"this system has no pidfd_open: {cause}"
    return READY


def thread_count() -> int:
    """Number of threads in this process, including libraries'."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _fork(descriptors: Sequence[int], control: socket.socket, others: Iterable[_Child]) -> _Child:
    *standard, line_descriptor = descriptors
    line = socket.socket(fileno=line_descriptor)
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _end_with(server)
            for child in others:
                child.line.close()
                os.close(child.ended)
            control.close()
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
                os.close(descriptor)
            with line, line.makefile("r") as stream:
                request = json.loads(stream.readline())
            _run(**request)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  (the interpreter would end here)
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    for descriptor in standard:
        os.close(descriptor)
    child = _Child(pid, os.pidfd_open(pid), line)
    line.sendall(f"{pid}\n".encode())
    return child


def _end_with(server: int) -> None:
    """Have the kernel kill this process when the server dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str], home: str) -> None:
    """Run `python -m module arguments`, as far as a process with imported packages can."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(home)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
