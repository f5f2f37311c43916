"""Background servers by name. Each has a folder in the user folder with `deployment.json` and `log.txt`. A name is in
use while its process is alive."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from sdflow import __version__
from sdflow.disk.atomic_write import replacing
from sdflow.disk.locked_folder import alone_in
from sdflow.disk.user_folder import user_folder
from sdflow.errors import UsageError
from sdflow.processes.workers import python_command
from sdflow.serve.log import ROTATED

VARIABLE = "SDFLOW_DEPLOYMENTS"
DRAIN = "--drain-timeout"
FILE, LOG = "deployment.json", "log.txt"
START_SECONDS = 600.0
END_SECONDS = 30.0
"""Time for the server to shut down after its requests finish."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Deployment:
    """A server in the background. created: process start time in seconds since 1970, because pids are reused. drain:
    seconds that requests may continue after SIGTERM."""

    name: str
    pid: int
    created: float
    url: str
    version: str
    pipelines: tuple[str, ...]
    key_file: str | None
    log: str
    drain: float = 60.0

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        import psutil

        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        return False

    @property
    def state(self) -> str:
        """Either "running", "ended" (a clean shutdown) or "died"."""
        if self.running:
            return "running"
        with suppress(OSError):
            if "ended" in [each["event"] for each in _events(Path(self.log))][-3:]:
                return "ended"
        return "died"


def deploy(
    name: str, pipelines: Sequence[Path], options: Sequence[str] = (), *, key_file: Path | None = None
) -> Deployment:
    """Start `sdflow serve` with these options in the background and wait until it is ready. It outlives this process.

    Raises UsageError if the name is taken or invalid, or with the end of the log if the server exits first.
    """

    def refuse() -> NoReturn:
        raise UsageError(
            "another command is deploying it", where=name, remedy="Wait until it finishes, or use another name."
        )

    folder = _folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, refuse):
        found = _read(folder)
        if found is not None and found.running:
            raise UsageError(
                f"already running at {found.url}",
                where=name,
                remedy=f"Stop it first (`sdflow terminate {name}`), or use another name.",
            )
        for file in (FILE, LOG, f"{LOG}.1"):
            (folder / file).unlink(missing_ok=True)
        key = None if key_file is None else str(key_file.absolute())
        options = options if key is None else (*options, "--api-key-file", key)
        return _started(name, folder, [each.absolute() for each in pipelines], options, key)


def _started(name: str, folder: Path, pipelines: Sequence[Path], options: Sequence[str], key: str | None) -> Deployment:
    """Start the server. Record it once it listens, in case this process is killed while the pipelines load."""
    import psutil

    log = folder / LOG
    command = [*python_command("sdflow", "serve"), *map(str, pipelines), *options]
    here = str(Path(__file__).parents[2])  # so that a checkout of sdflow is importable
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", ROTATED: str(log)}
    with log.open("ab") as sink:  # append mode: the server truncates it (`sdflow.serve.log`)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True, env=env
        )
    try:
        created = psutil.Process(process.pid).create_time()
        url = str(_wait_for("serving", process, log, name)["url"])
        names = tuple(each.resolve().name for each in pipelines)
        drain = float(options[options.index(DRAIN) + 1]) if DRAIN in options else Deployment.drain
        made = Deployment(name, process.pid, created, url, __version__, names, key, str(log), drain)
        with replacing(folder / FILE) as temporary:
            temporary.write_text(json.dumps(asdict(made), indent=2) + "\n")
        _wait_for("ready", process, log, name)
    except BaseException:
        (folder / FILE).unlink(missing_ok=True)
        process.terminate()
        raise
    return made


def deployments() -> list[Deployment]:
    """Return all known deployments, including those whose process has died."""
    root = user_folder("deployments", VARIABLE)
    found = [_read(folder) for folder in sorted(root.iterdir())] if root.is_dir() else []
    return [each for each in found if each is not None]


def find_deployment(name: str) -> Deployment:
    """Return the running deployment of this name. Raises UsageError otherwise, with the end of its log."""
    found = _read(_folder(name))
    if found is None:
        known = ", ".join(each.name for each in deployments()) or "none"
        raise UsageError(f"no such deployment; known: {known}", where=name, remedy="Start it with `sdflow deploy`.")
    if not found.running:
        said = "died" if found.state == "died" else "has ended"
        raise UsageError(
            f"process {found.pid} {said}; the end of its log:\n{_end_of(Path(found.log))}",
            where=name,
            remedy=f"Deploy it again, or remove it with `sdflow terminate {name}`.",
        )
    return found


def terminate(name: str) -> Deployment:
    """Terminate a server after current requests finish and forget it; a dead one is only forgotten. Raises
    UsageError."""
    folder = _folder(name)
    found = _read(folder)
    if found is None:
        return find_deployment(name)  # raises
    if found.running:
        os.kill(found.pid, signal.SIGTERM)
        end = time.monotonic() + found.drain + END_SECONDS
        while found.running:
            if time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.kill(found.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            time.sleep(0.05)
    with suppress(FileNotFoundError), alone_in(folder):  # another process may terminate it too
        if _read(folder) in (found, None):  # unless redeployed; None: a deploy that gave up
            shutil.rmtree(folder)
    return found


def _folder(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name",
            remedy="Use at most 64 letters, digits and _.-, starting with a letter or digit.",
        )
    return user_folder("deployments", VARIABLE) / name


def _read(folder: Path) -> Deployment | None:
    try:
        value: dict[str, Any] = json.loads((folder / FILE).read_text())
        return Deployment(**{**value, "pipelines": tuple(value["pipelines"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"is damaged: {error}", where=str(folder / FILE), remedy="Remove its folder.") from error


def _wait_for(event: str, process: subprocess.Popen[bytes], log: Path, name: str) -> dict[str, Any]:
    """Wait for this event in the log and return its fields. Raises UsageError if the server or its worker fails
    first."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        ended = process.poll() is not None
        events = {line["event"]: line for line in _events(log)}
        if event in events:
            return events[event]
        if "ended" in events:
            raise UsageError("it was stopped before it was ready", where=name, remedy="Deploy it again.")
        if ended or "worker_lost" in events:
            raise UsageError(
                f"it failed to start:\n{_end_of(log)}",
                where=name,
                remedy="Run the same command with `serve` to see the whole log.",
            )
        time.sleep(0.1)
    raise UsageError(
        f"it was not ready after {START_SECONDS:g} s:\n{_end_of(log)}",
        where=name,
        remedy="Check `sdflow status` later, or run the same command with `serve` to see the whole log.",
    )


def _events(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


def _end_of(log: Path, lines: int = 15) -> str:
    with suppress(OSError):
        return "\n".join(f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])
    return "  | (no log)"
