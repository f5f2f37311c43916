"""Duration of a denoiser run by batch size, measured at startup and updated by the runs of requests.

A busy machine distorts single measurements. The last runs of each size therefore count, and if enough images are
queued, a size that did not pay before is tried again now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from sdflow.serve.engine.waiting import SIZES, next_batch, worthwhile_sizes

RECENT = 8
"""Number of recent runs per size that count."""

FIRST_TRIAL, MOST_BETWEEN = 64, 4096
"""Initial and maximum runs between two trials of other sizes. A trial that changes nothing doubles the number."""

TRIAL_RUNS, UNTIMED = 6, 2
"""Runs of a trial, and how many of the first are not timed: the first creates the session, and on a GPU the second
waits for the previous run, which had another size."""


class Pace:
    """The pace of one pipeline in one lane. seconds: of a run by size. again: whether to try other sizes. forget:
    releases what a size that does not pay holds."""

    def __init__(
        self, seconds: Mapping[int, float], *, again: bool = False, forget: Callable[[int], None] = lambda size: None
    ) -> None:
        self._last = {size: deque([taken], RECENT) for size, taken in seconds.items()}
        self._again, self._forget, self._given = again, forget, tuple(seconds)
        self._impossible: set[int] = set()
        self._runs, self._between, self._before, self._in_a_row = 0, FIRST_TRIAL, 0, 0
        self._trial: int | None = None
        self._chosen = self._worthwhile()

    @property
    def seconds(self) -> Mapping[int, float]:
        """Seconds of a run by batch size, for the sizes worth using."""
        return self._chosen

    @property
    def places(self) -> int:
        """Number of images that may be in their denoising steps at once."""
        return max(self._trial or 1, *self._chosen)

    def size(self, images: int) -> int:
        """Return the size of the next batch for this many images."""
        if self._trial is not None and images >= self._trial:
            return self._trial
        return next_batch(images, self._chosen)

    def note(self, size: int, seconds: float, waiting: int) -> None:
        """Record a run of images of the model's own size. waiting: images that did not fit into it."""
        self._in_a_row = self._in_a_row + 1 if size == self._before else 1
        self._before = size
        if self._in_a_row > UNTIMED:
            self._last.setdefault(size, deque(maxlen=RECENT)).append(seconds)
        self._runs += 1
        if self._trial is None and self._runs % RECENT == 0:
            self._chosen = self._worthwhile()
        if not self._again:
            return
        if self._trial is None and self._runs >= self._between and waiting:
            self._begin_trial(size + waiting)
        elif size == self._trial and self._in_a_row >= TRIAL_RUNS:
            self._end_trial()
        elif self._runs >= self._between + 2 * FIRST_TRIAL:  # too few images for the trial
            self._trial, self._runs = None, 0

    def failed(self, size: int) -> None:
        """Record that batches of this size do not fit in memory."""
        self._impossible.add(size)
        self._last.pop(size, None)
        self._trial, self._chosen = None, self._worthwhile()

    def _begin_trial(self, images: int) -> None:
        used = max(self._chosen)
        larger = [size for size in SIZES if used < size <= images and size not in self._impossible]
        self._trial = larger[0] if larger else None
        if self._trial is None:
            self._runs = 0

    def _end_trial(self) -> None:
        assert self._trial is not None
        tried, before = self._trial, self._chosen
        self._trial, self._runs, self._chosen = None, 0, self._worthwhile()
        if tried not in self._chosen:
            self._last.pop(tried, None)
            self._forget(tried)
        changed = self._chosen.keys() != before.keys()
        self._between = FIRST_TRIAL if changed else min(2 * self._between, MOST_BETWEEN)

    def _worthwhile(self) -> dict[int, float]:
        known = {size: min(last) for size, last in sorted(self._last.items()) if last}
        if not self._again:
            return {size: known[size] for size in self._given if size in known}
        return worthwhile_sizes(known.get)
