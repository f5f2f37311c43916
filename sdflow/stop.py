"""Cooperative shutdown of this process (Ctrl-C, SIGTERM).

The signal raises Stopped in the main thread. Other threads cannot be interrupted, so long work calls `check` now and
then. Processes that a library started on its own are ended first (`end_children_when_told`).
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

SECONDS_TO_CLEAR = 1.0
"""Time for a child to remove its temporary files before it is killed."""


class Stopped(BaseException):
    """The process was asked to end. Not a KeyboardInterrupt, on which typer would exit without a message."""


_told = threading.Event()
_children_end = threading.Event()
_ending = threading.Lock()


def tell() -> None:
    """Make `check` raise in every thread from now on."""
    _told.set()


def requested() -> bool:
    return _told.is_set()


def check() -> None:
    """Raise Stopped if the process was asked to end."""
    if _told.is_set():
        raise Stopped


def end_children_when_told() -> None:
    """Make `end_children` end all processes below this one: torch's compile workers would outlive it by a minute, and a
    compiler until it is done. Not for our own workers, which their group ends."""
    _children_end.set()


def end_children(seconds_to_clear: float = SECONDS_TO_CLEAR) -> None:
    """End all child processes, if `end_children_when_told` was called. Each is suspended first, so that none starts
    another meanwhile, then gets SIGTERM, on which a compiler removes its output; the rest are killed after
    `seconds_to_clear`."""
    if not _children_end.is_set():
        return
    import psutil

    logging.disable(logging.CRITICAL)  # torch logs a traceback when its workers are gone
    with _ending:
        held: list[psutil.Process] = []
        while new := [each for each in psutil.Process().children(recursive=True) if each not in held]:
            for each in new:
                with suppress(psutil.Error):
                    each.suspend()
            held += new
        for act in (psutil.Process.terminate, psutil.Process.resume):
            for each in held:
                with suppress(psutil.Error):
                    act(each)
        for each in psutil.wait_procs(held, timeout=seconds_to_clear)[1]:
            with suppress(psutil.Error):
                each.kill()
