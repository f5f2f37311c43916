"""Work on several lines to the remote at a time, given up when none of them moves.

The threads are no reason to stay: one that hangs in a library does not keep the process from its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from sdflow.store.remote.share import LISTING, Found, Share, Unusable

LINES = 12
LOOK = 0.1

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Lines:
    """Lines to a remote. meanwhile: called again and again by whoever waits for one; what it raises ends the work."""

    share: Share
    meanwhile: Callable[[], None] = lambda: None

    def for_each(
        self,
        items: Iterable[T],
        do: Callable[[T], R],
        done: Callable[[R], None] = lambda result: None,
        timeout: float | None = None,
    ) -> None:
        """Call `do` with each item, several at a time; `done` with each result, in the calling thread. timeout: by default the
        remote's. Raises what `do` raises first, Unusable when so many seconds pass without a result, and what `meanwhile` raises.
        """
        patience = self.share.spec.timeout if timeout is None else timeout
        left: SimpleQueue[T] = SimpleQueue()
        results: SimpleQueue[tuple[bool, R | BaseException]] = SimpleQueue()
        ended = threading.Event()
        count = 0
        for item in items:
            left.put(item)
            count += 1

        def work() -> None:
            while not ended.is_set():
                try:
                    item = left.get_nowait()
                except Empty:
                    return
                try:
                    results.put((True, do(item)))
                except BaseException as error:  # noqa: BLE001  (it is raised in the caller)
                    results.put((False, error))

        for _ in range(min(LINES, count)):
            threading.Thread(target=work, name="remote cache", daemon=True).start()
        moved = time.monotonic()
        try:
            while count:
                self.meanwhile()
                try:
                    well, result = results.get(timeout=LOOK)
                except Empty:
                    if time.monotonic() - moved > patience:
                        raise Unusable(f"no answer for {patience:g} seconds") from None
                    continue
                moved = time.monotonic()
                count -= 1
                if not well:
                    assert isinstance(result, BaseException)
                    raise result
                done(result)  # type: ignore[arg-type]
        finally:
            ended.set()

    def found(self, items: Iterable[T], look: Callable[[T], R | None]) -> list[R]:
        """The results of `for_each` but for None, in the order in which they come."""
        results: list[R | None] = []
        self.for_each(items, look, results.append)
        return [result for result in results if result is not None]

    def one(self, do: Callable[[], R], timeout: float | None = None) -> R:
        """The result of one call, in the same way."""
        results: list[R] = []
        self.for_each([None], lambda _: do(), results.append, timeout)
        return results[0]

    def listed(self, folder: str) -> list[Found]:
        """The files of a folder. A long list takes its time."""
        return self.one(lambda: list(self.share.list(folder)), LISTING * self.share.spec.timeout)
