"""A real server of the small pipeline, in a process of its own, on a port that the system chose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import httpx
import psutil
import pytest
from started_python import Started, StartedPython
from until import PATIENCE

SIZE = "64x64"


@dataclass
class RunningServer:
    """A server. lines: of its log so far; others: what else it wrote to standard error."""

    process: subprocess.Popen[bytes] | Started
    errors: IO[bytes]
    lines: list[dict[str, Any]] = field(default_factory=list)
    heard: threading.Condition = field(default_factory=threading.Condition)
    url: str = ""
    others: list[bytes] = field(default_factory=list)

    def listen(self) -> None:
        """Take its log, until it ends."""
        for line in self.errors:
            if line.startswith(b"{"):
                with self.heard:
                    self.lines.append(json.loads(line))
                    self.heard.notify_all()
            else:
                self.others.append(line)
                sys.stderr.buffer.write(line)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], begin: int = 0) -> dict[str, Any]:
        """The first line of the log that is wanted, from the line `begin` on."""

        def found() -> dict[str, Any] | None:
            return next((line for line in self.lines[begin:] if wanted(line)), None)

        with self.heard:
            assert self.heard.wait_for(lambda: found() is not None, PATIENCE), f"not in the log: {self.lines}"
            line = found()
        assert line is not None
        return line

    def wait_until_ready(self, begin: int = 0) -> None:
        self.wait_for(lambda line: line["event"] == "ready", begin)

    def worker(self) -> psutil.Process:
        """The process that draws: the one with the most memory."""
        return max(psutil.Process(self.process.pid).children(), key=lambda each: each.memory_info().rss)

    def metrics(self, name: str, **headers: str) -> float:
        """One figure of /metrics, by its name with its labels; 0 where it is not there yet."""
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=PATIENCE).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@contextmanager
def running_server(
    *arguments: str,
    ready: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
    started: StartedPython | None = None,
) -> Iterator[RunningServer]:
    """`sdflow serve` with these arguments, on a free port. environment: besides that of the tests. started: forks it."""
    words = ("sdflow", "serve", *arguments, "--port", "0", "--threads", "1")
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    process: subprocess.Popen[bytes] | Started
    if started is None:
        process = subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, env=variables)
        assert process.stderr is not None
        errors: IO[bytes] = process.stderr
    else:
        process, errors = started.start_with_errors(words, variables)
    server = RunningServer(process, errors)
    thread = threading.Thread(target=server.listen, daemon=True)
    thread.start()
    try:
        server.url = server.wait_for(lambda line: line["event"] == "serving")["url"]
        if ready:
            server.wait_until_ready()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
        thread.join(PATIENCE)


@pytest.fixture(autouse=True)
def _memory_of_its_own() -> Iterator[None]:
    """Workers limit their memory, also those that a test has in its own process."""
    if sys.platform == "win32":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture(scope="session")
def server(tiny_pipeline: Path, started_python: StartedPython | None) -> Iterator[RunningServer]:
    """Of the small pipeline; at most two images in a run."""
    options = ("--batch-sizes", "1,2", "--max-queue", "12", "--max-images", "4")
    with running_server(str(tiny_pipeline), *options, started=started_python) as server:
        yield server
