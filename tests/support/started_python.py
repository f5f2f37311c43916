"""`sdflow` as a process of its own, forked from one that has the large packages imported: to import them takes longer than
what most commands do. So are the workers that such a command starts.

A process that is started so has its own folder, environment, arguments, standard streams and exit status, and runs what is to be
run at exit. What importing sdflow's modules and the packages does is not seen here, nor what taking modules apart at the end
does: who holds that starts Python (`Shell`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import pytest
from python_server import Line, Started

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("python_server.py")
Command = Callable[..., subprocess.CompletedProcess[str]]


class StartedPython:
    """A process that has imported large packages, and forks one for each command and for each of its workers."""

    def __init__(self) -> None:
        asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": "", "TRANSFORMERS_VERBOSITY": "error"}
        numbers = (asking.fileno(), answering.fileno())
        command = [sys.executable, "-P", str(SERVER), *map(str, numbers)]
        with answering:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=numbers, env=environment)
        self.line = Line(asking)

    def run(self, arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """Run `python -m` with the arguments: exit status, standard output and error."""
        with Path(os.devnull).open() as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
            descriptors = (nothing.fileno(), out.fileno(), error.fileno())
            status = self.line.start(arguments, folder, environment, descriptors).wait()
            out.seek(0)
            error.seek(0)
            return status, out.read().decode(), error.read().decode()

    def start_with_errors(self, arguments: tuple[str, ...], environment: Mapping[str, str]) -> tuple[Started, BinaryIO]:
        """Start `python -m` with the arguments here; with what it writes to standard error, to be read."""
        reader, writer = os.pipe()
        with Path(os.devnull).open() as nothing, os.fdopen(writer, "wb"):
            process = self.line.start(arguments, Path.cwd(), environment, (nothing.fileno(), 1, writer))
        return process, os.fdopen(reader, "rb")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self.line.socket.close()


@pytest.fixture(scope="session")
def started_python() -> Iterator[StartedPython | None]:
    """None where processes are not forked."""
    if sys.platform != "linux":
        yield None
        return
    started = StartedPython()
    yield started
    started.end()


@pytest.fixture(scope="session")
def sdflow(started_python: StartedPython | None) -> Command:
    """Runs `sdflow` with these arguments in `folder`, with this environment beside the tests' own."""

    def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sdflow", *arguments]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        if started_python is None:
            return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        return subprocess.CompletedProcess(command, *started_python.run(("sdflow", *arguments), folder, variables))

    return run


__all__ = ["ROOT", "Command", "Started", "StartedPython", "sdflow", "started_python"]
