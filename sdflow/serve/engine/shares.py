"""Fair sharing of device time between groups of images, however long their steps take (start-time fair queueing)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping


class Shares:
    """A new group starts at the virtual time of the group that ran last, so that it does not wait for another step. A
    returning kind starts where its last group ended, so that it gets no more than its share."""

    def __init__(self) -> None:
        self._until: dict[Hashable, float] = {}
        self._ended: dict[Hashable, float] = {}
        self._took: dict[Hashable, float] = {}
        self._now = 0.0

    def next(self, kinds: Mapping[Hashable, Hashable]) -> Hashable:
        """Return the group with the least device time, the first of equals. kinds: the kind of each group."""
        self._until = {
            group: self._until.get(group, max(self._now, self._ended.get(kind, 0.0))) for group, kind in kinds.items()
        }
        chosen = min(self._until, key=self._until.__getitem__)
        self._now = self._until[chosen]
        self._ended = {kind: until for kind, until in self._ended.items() if until > self._now}
        present = {*kinds.values()}
        self._took = {kind: taken for kind, taken in self._took.items() if kind in present}
        return chosen

    def ran(self, group: Hashable, kind: Hashable, seconds: float) -> None:
        self._until[group] = self._until.get(group, self._now) + seconds
        self._took[kind], self._ended[kind] = seconds, self._until[group]

    def step(self, kind: Hashable) -> float:
        """Return the seconds of this kind's last step, 0 before. By kind, because the group may change at each step."""
        return self._took.get(kind, 0.0)
