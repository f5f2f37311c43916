"""Pieces of work for tests/processes/test_workers.py, run as `python -m worker_samples` in a process of their own."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from sdflow.errors import PassError
from sdflow.processes.in_worker import serve_request


def look() -> dict[str, Any]:
    """What one worker could leave for the next, had it a way."""
    import numpy

    return {
        "modules": sorted(name for name in sys.modules if name.startswith("left_behind")),
        "variable": os.environ.get("LEFT_BEHIND"),
        "folder": Path.cwd() == Path.home(),
        "path": "/left/behind" in sys.path,
        "arguments": sys.argv[1:],
        "patched": [
            numpy.zeros(2).tolist(),
            sys.getrecursionlimit(),
            signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
        ],
        "mask": os.umask(0o22),
        "threads": [thread.name for thread in threading.enumerate() if thread.name == "left behind"],
        "random": random.getstate() == LEFT_STATE,
        "audited": AUDITED,
        "home": sorted(path.name for path in Path.home().iterdir()),
        "children": [child.name() for child in psutil.Process().children()],
        "session": os.getsid(0) == os.getpid(),
    }


LEFT_STATE = random.Random(7).getstate()
AUDITED: list[str] = []


def change_everything() -> None:
    import numpy

    sys.modules["left_behind"] = types.ModuleType("left_behind")
    os.environ["LEFT_BEHIND"] = "1"
    (Path.home() / "file").touch()
    os.chdir("/")
    sys.path.append("/left/behind")
    sys.argv.append("left behind")
    numpy.zeros = numpy.ones
    sys.setrecursionlimit(4321)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.umask(0)
    threading.Thread(target=time.sleep, args=(600,), name="left behind", daemon=True).start()
    random.setstate(LEFT_STATE)
    AUDITED.append("left behind")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"])


def work(request: Mapping[str, Any], phase: Callable[[str], None]) -> Any:
    match request["do"]:
        case "echo":
            phase("echoing")
            print("this goes to the log")
            return request["value"]
        case "environment":
            return dict(os.environ)
        case "refuse":
            raise PassError("no such weight", where="unet", remedy="name another")
        case "bug":
            return {}["missing"]
        case "fill the disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        case "reach the file size limit":
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
            return Path("file").write_bytes(bytes(100))
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "allocate":
            return len(bytearray(os.urandom(1)) * request["bytes"])
        case "look up":
            return socket.getaddrinfo("example.com", 443)[0][4][0]
        case "connect":
            socket.create_connection(("127.0.0.1", request["port"]), timeout=2)
            return "connected"
        case "write home":
            (Path.home() / "device-id").write_text("trace")
            return str(Path.home())
        case "hang":
            Path(request["pid_file"]).write_text(str(os.getpid()))
            time.sleep(600)
        case "announce and hang":
            phase("hanging")
            time.sleep(600)
        case "look":
            return look()
        case "change everything":
            change_everything()
            return look()
        case "modules":
            return sorted(sys.modules)
        case "write where the server was at home":
            import keeps_home

            (keeps_home.HOME / "device-id").write_text("trace")
        case "leave":
            leave(Path(request["pid_file"]), request["how"])
            return end(request["end"])
    raise AssertionError(request)


SLEEPER = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


def leave(pid_file: Path, how: str) -> None:
    """Start a process that would outlive this one, and wait until it runs: a fork, one in a session of its own whose parent has
    ended, or a program of which nothing but a clean environment is left."""
    if how == "a fork":
        if os.fork() == 0:
            pid_file.write_text(str(os.getpid()))
            time.sleep(600)
            os._exit(0)
    elif how == "a daemon":
        if (child := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                os.chdir("/")
                pid_file.write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        os.waitpid(child, 0)
    else:
        subprocess.Popen([sys.executable, "-c", SLEEPER, str(pid_file)], env={}, start_new_session=True)
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.01)


def end(how: str) -> str:
    match how:
        case "raises":
            raise PassError("no such weight")
        case "exits":
            os._exit(7)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(600)
    return how


if __name__ == "__main__":
    serve_request(work)
