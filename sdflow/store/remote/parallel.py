"""Work on several lines to the remote at a time, given up when none of them moves.

The threads are no reason to stay: one that hangs in a library does not keep the process from its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import TypeVar

from sdflow.store.remote.share import Unusable

LINES = 12
LOOK = 0.1

T = TypeVar("T")
R = TypeVar("R")


def for_each(
    items: Iterable[T],
    do: Callable[[T], R],
    *,
    timeout: float,
    meanwhile: Callable[[], None] = lambda: None,
    done: Callable[[R], None] = lambda result: None,
) -> None:
    """Call `do` with each item, several at a time; `done` with each result, in the calling thread.

    Raises what `do` raises first, Unusable when `timeout` seconds pass without a result, and what `meanwhile` raises: it is
    called again and again.
    """
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
            meanwhile()
            try:
                well, result = results.get(timeout=LOOK)
            except Empty:
                if time.monotonic() - moved > timeout:
                    raise Unusable(f"no answer for {timeout:g} seconds") from None
                continue
            moved = time.monotonic()
            count -= 1
            if not well:
                assert isinstance(result, BaseException)
                raise result
            done(result)  # type: ignore[arg-type]
    finally:
        ended.set()


def found(
    items: Iterable[T],
    look: Callable[[T], R | None],
    *,
    timeout: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[R]:
    """The results of `for_each` but for None, in the order in which they come."""
    results: list[R | None] = []
    for_each(items, look, timeout=timeout, meanwhile=meanwhile, done=results.append)
    return [result for result in results if result is not None]


def one(do: Callable[[], R], *, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> R:
    """The result of one call, in the same way."""
    results: list[R] = []
    for_each([None], lambda _: do(), timeout=timeout, meanwhile=meanwhile, done=results.append)
    return results[0]
