"""Who gets the device next: groups of images share its time, whatever a step of each takes (start-time fair queueing)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping


class Shares:
    """A group that comes starts where the one began that ran last, so that it need not wait for another step. A kind that comes
    again starts where its last group ended, so that it gets no more than its share."""

    def __init__(self) -> None:
        self._until: dict[Hashable, float] = {}
        self._ended: dict[Hashable, float] = {}
        self._took: dict[Hashable, float] = {}
        self._now = 0.0

    def next(self, kinds: Mapping[Hashable, Hashable]) -> Hashable:
        """Of these groups, each with its kind, the one that has had least; of several, the first."""
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
        """It had a step."""
        self._until[group] = self._until.get(group, self._now) + seconds
        self._took[kind], self._ended[kind] = seconds, self._until[group]

    def step(self, kind: Hashable) -> float:
        """Seconds that the last one of this kind took; 0 before it. Not by group, which may be another at each step."""
        return self._took.get(kind, 0.0)
