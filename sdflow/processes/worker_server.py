"""Forks workers from a process that has their packages imported already. Linux only: elsewhere each worker is spawned.

torch, olive and diffusers take seconds to import, and every step of a build is a process of its own. A server imports
what a kind of step needs, once for a run, and forks a worker for each step. What makes that as safe as a new process:

- The server only imports. It runs no pass, loads no script of a user's, and has one thread whenever it forks.
- A worker has an environment, a home, a current folder, a session and descriptors of its own, as a spawned one.
- A worker that is no longer wanted is killed: when its line closes, because the run ended or died; when the server dies.

Servers stand on one another: the packages come in layers, and a layer's server is forked from the one below it. So
nothing is imported twice, and a worker holds the packages of its layer and those below, no others.

A server gets on standard input a socket, and over it a byte for each worker with four descriptors: the worker's
standard input, output and error, and its line. On the line it finds what to run; the server answers there with the
process id and, at its end, with the exit status.
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
from sdflow.processes.process_tree import adopt_orphans, kill_descendants, kill_session
from sdflow.processes.workers import SIDE_BY_SIDE, Descriptors, Start, Worker, clean_environment, deny_network

AVAILABLE = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
READY = "ready"


class NoServerError(Exception):
    """A server could not start; `str()` says why. Workers can start without it."""


class WorkerServer:
    """A server, seen from the run. `fork` starts a worker, and is a `Start` as `sdflow.processes.workers.spawn` is."""

    def __init__(self, modules: Sequence[str], start: Start, on_start: Callable[[Worker], None]) -> None:
        """Start a server that has imported `modules`, by `start`: spawned, or forked from another server.

        on_start: called with its process; what it raises ends it. Raises NoServerError.
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
        """Start `python -m module` in a fork of the server. Raises PassError when the server is gone."""
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
        """End it and the workers it has, and wait for that."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._scratch.close()


class _ForkedWorker:
    """A worker that a server has forked. Only the server kills it: it alone knows whether the id is still its own."""

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
            return  # the other end is closed: it has ended

    def wait(self) -> int:
        if self._status is None:
            said = self._answers.readline()
            self._status = int(said) if said else -signal.SIGKILL  # the server died, and took it along
            self._answers.close()
            self._line.close()
        return self._status


@dataclass(frozen=True)
class _Child:
    """A worker, seen from its server. ended: a descriptor that is readable when the process has ended."""

    pid: int
    ended: int
    line: socket.socket


def serve(modules: Sequence[str]) -> NoReturn:
    """The server's side: import the modules, then fork a worker for each request until the socket closes."""
    control = socket.socket(fileno=os.dup(0))
    deny_network()
    adopt_orphans()
    importlib.import_module("psutil")  # here, so that no worker's end waits for it
    for module in modules:
        importlib.import_module(module)
    control.sendall(f"{_prepare_to_fork()}\n".encode())
    poller = select.poll()
    poller.register(control, select.POLLIN)
    running: dict[int, _Child] = {}  # by the descriptor of its end
    wanted: dict[int, _Child] = {}  # by the descriptor of its line
    while True:
        found = poller.poll()[0][0]  # one at a time: what is done about it may close others
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
            kill_session(child.pid)  # what it left in its group
            _, status = os.waitpid(child.pid, 0)
            kill_descendants(
                os.getpid(), spare=[each.pid for each in running.values()]
            )  # and its orphans, which are ours now
            with child.line, suppress(BrokenPipeError):
                child.line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(child.ended)


def _prepare_to_fork() -> str:
    """After the imports: READY, or why this process must not fork."""
    home = Path.home()
    shutil.rmtree(home)
    home.touch()  # a library that kept the path cannot leave anything there for the next worker
    gc.collect()
    gc.freeze()  # a worker's collections leave the packages alone, and so their pages shared
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(
        child, 0
    )  # OpenBLAS starts threads when numpy loads it, ends them at a fork, starts them when used again
    end = time.monotonic() + 1
    while thread_count() > 1:  # the last traces of those that ended
        if time.monotonic() > end:
            return f"importing the packages started {thread_count() - 1} threads"
        time.sleep(0.01)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as cause:
        return f"this system has no pidfd_open: {cause}"
    return READY


def thread_count() -> int:
    """How many threads this process has, those of libraries included."""
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
        except BaseException:  # noqa: BLE001  (this is where the interpreter would end)
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    for descriptor in standard:
        os.close(descriptor)
    child = _Child(pid, os.pidfd_open(pid), line)
    line.sendall(f"{pid}\n".encode())
    return child


def _end_with(server: int) -> None:
    """Have the system kill this process when the server dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str], home: str) -> None:
    """`python -m module arguments`, as far as a process can do so that has packages imported already."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(home)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
