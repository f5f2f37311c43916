"""Which of the worker's messages a replica passes on to the front.

Each message through Ray costs its two ends one to two milliseconds, and a worker sends two per step: at 20 steps an
image they would take more of the front's time than everything else. Does not import Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sdflow.serve.jobs import OfImage, Stepped, Turned

SECONDS = 0.25
"""Shortest time between two reports of an image's progress, or of the batches that ran."""


class Progress:
    """Reports that are due. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stepped: dict[tuple[str, int], float] = {}
        self._turned = -SECONDS
        self._batches: list[tuple[int, int, float]] = []

    def due(self, message: OfImage) -> bool:
        """Whether to pass on a message about an image: of its steps, one every `SECONDS`; otherwise all."""
        if not isinstance(message, Stepped):
            return True
        place, now = (message.request, message.index), self._clock()
        if now - self._stepped.get(place, -SECONDS) < SECONDS:
            return False
        self._stepped[place] = now
        return True

    def ended(self, request: str) -> None:
        """Forget the images of a request."""
        self._stepped = {place: at for place, at in self._stepped.items() if place[0] != request}

    def turned(self, message: Turned, listening: bool) -> Turned | None:
        """Return the report to pass on, with the batches of all that were held back; None if it is not due yet, or if
        no request is listening."""
        self._batches += message.batches
        early = message.drawing + message.waiting and self._clock() - self._turned < SECONDS
        if early or not listening:
            return None
        self._turned, batches = self._clock(), tuple(self._batches)
        self._batches.clear()
        return Turned(batches, message.drawing, message.waiting, message.memory)
