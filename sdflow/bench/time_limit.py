"""A limit on the time that an engine takes until it draws: torch.compile's max-autotune may take an hour."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sdflow.errors import UsageError

AGAIN_SECONDS = 5.0


class TooLong(BaseException):
    """No `Exception`: a compiler that tries one kernel after the other goes on after those."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Raises TooLong in here, in the main thread, when the time is over; at the next Python instruction, and again every 5
    seconds where a library swallowed it. None: no limit. Raises UsageError on Windows, which has no such timer.
    """
    if seconds is None:
        yield
        return
    if not hasattr(signal, "setitimer"):
        raise UsageError("Windows has no timer that could end it", where="--first-limit", remedy="Leave it out.")
    over = False

    def stop(*_: Any) -> None:
        if not over:
            raise TooLong(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
