"""Pieces of work for tests/test_workers.py, run as `python -m worker_samples` in a process of their own."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sdflow.errors import PassError
from sdflow.workers import serve_request


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
        case "sleep":
            Path(request["pid_file"]).write_text(str(os.getpid()))
            time.sleep(600)
    raise AssertionError(request)


if __name__ == "__main__":
    serve_request(work)
