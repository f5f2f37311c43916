"""sdflow as a user runs it: a command in a folder and a home directory of its own; whom it reached is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from started_python import StartedPython

ROOT = Path(__file__).parents[2]

# Python imports this in every process: it records each host name that is looked up, and each connection.
RECORDER = """
import os, sys
def record(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        what = str(arguments[0])
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        what = str(arguments[1])
    else:
        return
    with open(os.path.join(os.path.dirname(__file__), "reached"), "a") as log:
        log.write(what + "\\n")
sys.addaudithook(record)
"""


KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")


@dataclass
class Shell:
    """A folder, a home directory and an environment of their own; sdflow is run there as a command.

    started: forks its processes. None: each is a new Python, and whom it reaches is recorded. paths: of modules to import
    besides.
    """

    folder: Path
    started: StartedPython | None = None
    paths: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        """Of its processes."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name in KEPT}
        return {
            **kept,
            "HOME": str(home),
            "SDFLOW_CACHE": "cache",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *self.paths))),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("sdflow", *arguments)

    def python(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python -m MODULE`."""
        environment = self.environment()
        command = [sys.executable, "-m", module, *arguments]
        if self.started is not None:
            done = self.started.run((module, *arguments), self.folder, environment)
            return subprocess.CompletedProcess(command, *done)
        recorder = self.folder / "recorder"
        recorder.mkdir(exist_ok=True)
        (recorder / "sitecustomize.py").write_text(RECORDER)
        environment["PYTHONPATH"] = os.pathsep.join([str(recorder), environment["PYTHONPATH"]])
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
