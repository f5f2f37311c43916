"""Fair sharing of device time between kinds of images, however long their steps take (start-time fair queueing)."""

from __future__ import annotations

from collections.abc import Collection, Hashable


class Shares:
    """A new kind starts at the virtual time of the kind that ran last, so that it does not wait for another step. A
    returning kind starts where it ended, so that it gets no more than its share."""

    def __init__(self) -> None:
        self._until: dict[Hashable, float] = {}
        self._took: dict[Hashable, float] = {}
        self._now = 0.0

    def next(self, kinds: Collection[Hashable]) -> Hashable:
        """Return the kind with the least device time, the first of equals."""
        until = {kind: max(self._now, self._until.get(kind, 0.0)) for kind in kinds}
        chosen = min(until, key=until.__getitem__)
        self._now = until[chosen]
        left = {kind: ended for kind, ended in self._until.items() if ended > self._now}
        self._until = {**left, **until}
        self._took = {kind: taken for kind, taken in self._took.items() if kind in until}
        return chosen

    def ran(self, kind: Hashable, seconds: float) -> None:
        self._until[kind] = self._until.get(kind, self._now) + seconds
        self._took[kind] = seconds

    def step(self, kind: Hashable) -> float:
        """Return the seconds of this kind's last step, 0 before."""
        return self._took.get(kind, 0.0)
