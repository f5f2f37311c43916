"""The images that wait to be drawn, in the order in which they came. Several lanes may take from it (`sdflow.serve.lanes`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sdflow.serve.jobs import Job


class Waiting:
    """For several threads. changed: notified when something came or went."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self.changed = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> Sequence[Job]:
        """What waits now, the oldest first."""
        with self.changed:
            return tuple(self._jobs)

    def add(self, job: Job) -> None:
        with self.changed:
            self._jobs.append(job)
            self.changed.notify_all()

    def cancel(self, request: str) -> None:
        """Without what is of this request."""
        with self.changed:
            self._jobs = [job for job in self._jobs if job.request != request]
            self.changed.notify_all()

    def take(self, choose: Callable[[Sequence[Job]], Job | None]) -> Job | None:
        """What is chosen of it, which waits no more. Nobody else takes anything meanwhile."""
        with self.changed:
            chosen = choose(self._jobs)
            if chosen is not None:
                self._jobs.remove(chosen)
            return chosen
