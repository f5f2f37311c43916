"""Duration of a denoiser run by batch size, measured at startup and updated by the runs of requests.

A busy machine distorts single measurements. The last runs of each size therefore count, and if images had to wait, all
sizes are measured again once the server is idle: larger sizes need new sessions, which take seconds to create.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sdflow.serve.engine.waiting import next_batch, worthwhile_sizes

RECENT = 8
"""Number of recent runs per size that count."""

FIRST_AGAIN, MOST_BETWEEN = 64, 4096
"""Initial and maximum runs between two measurements. One that changes nothing doubles the number."""

UNTIMED = 2
"""Runs after a change of the batch size that are not timed: on a GPU, a run waits for the one before."""


class Pace:
    """The pace of one pipeline in one lane. seconds: of a run by size. again: whether sizes may change; otherwise an
    operator chose them."""

    def __init__(self, seconds: Mapping[int, float], *, again: bool = False) -> None:
        self._again, self._given, self._between = again, tuple(seconds), FIRST_AGAIN
        self._before, self._in_a_row = 0, 0
        self._begin(seconds)

    def _begin(self, seconds: Mapping[int, float]) -> None:
        self._last = {size: deque([taken], RECENT) for size, taken in seconds.items()}
        self._runs, self._waited = 0, False
        self._chosen = self._worthwhile()

    @property
    def seconds(self) -> Mapping[int, float]:
        """Seconds of a run by batch size, for the sizes worth using."""
        return self._chosen

    @property
    def places(self) -> int:
        """Number of images that may be in their denoising steps at once."""
        return max(self._chosen)

    @property
    def due(self) -> bool:
        """Whether the sizes should be measured again."""
        return self._again and self._waited and self._runs >= self._between

    def size(self, images: int) -> int:
        """Return the size of the next batch for this many images."""
        return next_batch(images, self._chosen)

    def note(self, size: int, seconds: float, waiting: int) -> None:
        """Record a run of images of the model's own size. waiting: images that did not fit into it."""
        self._in_a_row = self._in_a_row + 1 if size == self._before else 1
        self._before = size
        if size in self._last and self._in_a_row > UNTIMED:
            self._last[size].append(seconds)
        self._runs += 1
        self._waited |= waiting > 0
        if self._runs % RECENT == 0:
            self._chosen = self._worthwhile()

    def measured(self, seconds: Mapping[int, float]) -> None:
        """Replace the measurement."""
        changed = seconds.keys() != self._chosen.keys()
        self._between = FIRST_AGAIN if changed else min(2 * self._between, MOST_BETWEEN)
        self._begin(seconds)

    def failed(self, size: int) -> None:
        """Record that batches of this size do not fit in memory."""
        self._last.pop(size, None)
        self._chosen = self._worthwhile()

    def _worthwhile(self) -> dict[int, float]:
        known = {size: min(last) for size, last in sorted(self._last.items())}
        if not self._again:
            return {size: known[size] for size in self._given if size in known}
        return worthwhile_sizes(known.get)
