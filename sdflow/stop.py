"""Whether this process was told to end (Ctrl-C, SIGTERM).

The signal raises Stopped in the main thread. Other threads cannot be interrupted: what takes long looks here now and then.
"""

from __future__ import annotations

import threading


class Stopped(BaseException):
    """The process was told to end. Not a KeyboardInterrupt: typer would end that one by itself, without a word."""


_told = threading.Event()


def tell() -> None:
    """From now on `check` raises, in every thread."""
    _told.set()


def told() -> bool:
    return _told.is_set()


def check() -> None:
    """Raise Stopped if the process was told to end."""
    if _told.is_set():
        raise Stopped
