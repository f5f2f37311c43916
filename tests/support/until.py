"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600
"""Seconds for what comes in a few: nothing is timed by them, and machines are slow."""


def until(condition: Callable[[], bool], what: str = "it did not come") -> None:
    """Fails when the condition does not hold in the end."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)
