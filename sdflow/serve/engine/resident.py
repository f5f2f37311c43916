"""The memory that this process takes."""

from __future__ import annotations

import time


class Resident:
    """Bytes of this process in memory, looked up now and then: that takes as long as several steps' messages."""

    SECONDS = 0.5

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._known, self._until = 0, 0.0

    def bytes(self) -> int:
        """As of half a second ago at most."""
        if time.monotonic() >= self._until:
            self._known, self._until = int(self._process.memory_info().rss), time.monotonic() + self.SECONDS
        return self._known
