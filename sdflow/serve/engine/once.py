"""What several threads want and one of them computes: whoever asks first does, the others wait for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, MutableMapping
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Once(Generic[Value]):
    """Values by key. For several threads; who asks for another key does not wait."""

    def __init__(self, kept: MutableMapping[Hashable, Value], most: int | None = None) -> None:
        """kept: where they stay. most: how many, the last ones asked for; None: any number."""
        self._lock, self._kept, self._most = threading.Lock(), kept, most
        self._coming: dict[Hashable, Future[Value]] = {}

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The value of this key. Raises what `compute` raises, each time anew."""
        with self._lock:
            there, coming = self._kept.pop(key, None), self._coming.get(key)
            if there is not None:
                self._kept[key] = there
                return there
            if first := coming is None:
                coming = self._coming[key] = Future()
        if first:
            self._compute(key, coming, compute)
        return coming.result()

    def _compute(self, key: Hashable, coming: Future[Value], compute: Callable[[], Value]) -> None:
        try:
            value = compute()
        except BaseException as error:
            with self._lock:
                del self._coming[key]
            coming.set_exception(error)
            raise
        with self._lock:
            while self._most is not None and len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = value
            del self._coming[key]
        coming.set_result(value)
