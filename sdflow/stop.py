"""Whether this process was told to end (Ctrl-C, SIGTERM).

The signal raises Stopped in the main thread. Other threads cannot be interrupted: what takes long looks here now and then.
Processes that a library started, and that nobody here knows, are ended first (`end_children_when_told`).
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

SECONDS_TO_CLEAR = 1.0
"""That a child has to remove its temporary files, before it is killed."""


class Stopped(BaseException):
    """The process was told to end. Not a KeyboardInterrupt: typer would end that one by itself, without a word."""


_told = threading.Event()
_children_end = threading.Event()
_ending = threading.Lock()


def tell() -> None:
    """From now on `check` raises, in every thread."""
    _told.set()


def requested() -> bool:
    return _told.is_set()


def check() -> None:
    """Raise Stopped if the process was told to end."""
    if _told.is_set():
        raise Stopped


def end_children_when_told() -> None:
    """From now on all processes below this one end with it: torch's compile workers outlive it by a minute, and a compiler
    by as long as it compiles. Not for workers of our own, which their group ends."""
    _children_end.set()


def end_children(seconds_to_clear: float = SECONDS_TO_CLEAR) -> None:
    """End them, if that was asked for. Each is held first, so that none starts another while it is looked at; then each gets
    SIGTERM, at which a compiler removes what it wrote; what is there after `seconds_to_clear` is killed. One thread at a time."""
    if not _children_end.is_set():
        return
    import psutil

    logging.disable(logging.CRITICAL)  # torch tells in a traceback that its workers are gone
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
