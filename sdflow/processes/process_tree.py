"""Ends every process that another one has started, whatever session or parent it has given itself.

On Linux a process can take in the orphans below it (prctl(2), PR_SET_CHILD_SUBREAPER). Below one that does, nothing gets away by
forking twice or by a session of its own: all of it is found as its descendants for as long as it lives.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds after which processes that start others faster than they are ended are left."""


def adopt_orphans() -> None:
    """From now on what is orphaned below this process becomes its child. Linux only; elsewhere orphans go to init."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int, spare: Collection[int] = ()) -> None:
    """Kill all processes below `pid`, until there are none. spare: children of it that stay, with what is below them."""
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
    """Kill a process that leads a session of its own, all that is below it, and what is left of its group. It must not have
    been waited for yet: else its id may be another's."""
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
    """Wait for the children of this process that have ended, so that they do not stay as zombies."""
    import psutil

    for child in psutil.Process().children():
        if child.pid not in spare:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG if sys.platform != "win32" else 0)
