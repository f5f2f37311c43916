"""Kill all descendants of a process, even in other sessions or reparented.

On Linux a process can adopt orphans below it (prctl(2), PR_SET_CHILD_SUBREAPER). Nothing below such a process escapes
by double forking or a new session: everything remains its descendant while it lives.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds after which processes that spawn faster than they are killed are left."""


def adopt_orphans() -> None:
    """Make this process the parent of orphans below it from now on. Linux only; elsewhere init adopts them."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int, spare: Collection[int] = ()) -> None:
    """Kill all processes below `pid`. spare: its children that stay, with everything below them."""
    import psutil

    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            below = [each for each in psutil.Process(pid).children() if each.pid not in spare]
        except psutil.NoSuchProcess:
            return
        for child in tuple(below):
            with suppress(psutil.NoSuchProcess):
                below += child.children(recursive=True)
        alive = [each for each in below if _is_alive(each)]
        if not alive:
            break
        for each in alive:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                each.kill()
        psutil.wait_procs(alive, timeout=0.1)
    if pid == os.getpid():
        _reap(spare)


def kill_session(pid: int) -> None:
    """Kill a session leader, everything below it, and the rest of its group. It must not have been waited for yet, or
    its pid may belong to another process."""
    kill_descendants(pid)
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            os.kill(pid, 9)
        else:
            import signal

            os.killpg(pid, signal.SIGKILL)


def _is_alive(process: object) -> bool:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reap(spare: Collection[int]) -> None:
    """Wait for ended children of this process, which would otherwise stay as zombies."""
    import psutil

    for child in psutil.Process().children():
        if child.pid not in spare:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG if sys.platform != "win32" else 0)
