"""Children that a command starts by multiprocessing, as `sdflow serve` starts its worker, forked too.

They are forked from a process that the command forked at its beginning, when it had one thread, and are the command's children
all the same: the process between them and that one ends at once, and who is orphaned below the command becomes its child
(prctl(2), PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
LONGEST = 1 << 16
ABOVE = 200
"""Descriptors from here on are not a process's own."""
CODE = re.compile(r"from multiprocessing\.spawn import spawn_main; spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)")


def fork_children() -> dict[str, int] | None:
    """From now on processes of multiprocessing are forked. In each of them it returns the arguments of `spawn_main`; None in the
    process that called it."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        at_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is for the command
        main = _serve(theirs)
        signal.signal(signal.SIGINT, at_interrupt)
        return main
    theirs.close()
    started = util.spawnv_passfds  # type: ignore[attr-defined]

    def start(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        found = [match for each in arguments if isinstance(each, str) and (match := CODE.fullmatch(each))]
        if not found:
            return int(started(path, arguments, descriptors))
        request = {
            "main": {"tracker_fd": int(found[0][1]), "pipe_handle": int(found[0][2])},
            "descriptors": [0, 1, 2, *descriptors],
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
        }
        socket.send_fds(ours, [json.dumps(request).encode()], request["descriptors"])
        return int(ours.recv(32))

    util.spawnv_passfds = start  # type: ignore[attr-defined]
    return None


def _serve(requests: socket.socket) -> dict[str, int]:
    """Fork a process for each request until the command has ended."""
    while True:
        message, received, _, _ = socket.recv_fds(requests, LONGEST, 64)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if between := os.fork():
            for each in (*received, writer):
                os.close(each)
            with os.fdopen(reader) as stream:
                pid = stream.read()
            os.waitpid(between, 0)
            requests.send(pid.encode())
            continue
        if pid := os.fork():
            os.write(writer, str(pid).encode())
            os._exit(0)
        request = json.loads(message)
        return _begin(request, received)


def _begin(request: dict[str, Any], received: Sequence[int]) -> dict[str, int]:
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, ABOVE) for each in received]
    os.closerange(0, ABOVE)
    for number, each in zip(request["descriptors"], kept, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    main: dict[str, int] = request["main"]
    return main
