"""`sdflow` as a process of its own, forked from one that has the large packages imported: to import them takes longer than
what most commands do.

A command that is run so has its own folder, environment, arguments, standard streams and exit status, reads all of sdflow's
modules anew and ends as any Python does. What importing the packages themselves does is not seen here: who holds that
starts Python (`Shell`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "torch",
    "torch._dynamo",
    "onnx",
    "numpy",
    "PIL.Image",
    "transformers",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "diffusers",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion.safety_checker",
    "diffusers.schedulers",
    "typer",
    "pydantic",
    "rich.console",
)
"""None is of sdflow."""
LONGEST = 1 << 20
Command = Callable[..., subprocess.CompletedProcess[str]]


class StartedPython:
    """A process that has imported PACKAGES, and forks one for each command."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-P", __file__]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs, env=environment)

    def run(self, arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """Run `python -m` with the arguments: exit status, standard output and error."""
        request = {"arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
            socket.send_fds(self._line, [json.dumps(request).encode()], [out.fileno(), error.fileno()])
            said = self._line.recv(LONGEST)
            assert said, f"the process that starts commands ended with status {self._process.wait()}"
            out.seek(0)
            error.seek(0)
            return int(said), out.read().decode(), error.read().decode()

    def end(self) -> None:
        self._line.close()
        self._process.wait()


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


def serve() -> str:
    """Fork a process for each request until the line closes, one at a time. Returns the module to run, in such a process."""
    line = socket.socket(fileno=os.dup(0))
    for name in PACKAGES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process leaves the packages' pages shared
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, LONGEST, 2)
        if not message:
            os._exit(0)
        if pid := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            line.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        line.close()
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        request = json.loads(message)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        module, *sys.argv[1:] = request["arguments"]
        # As `python -m` does.
        sys.path[:0] = [request["folder"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        return str(module)


if __name__ == "__main__":
    runpy.run_module(serve(), run_name="__main__", alter_sys=True)
