"""Split denoiser graphs, cached for all pipelines with the same graph. LoRAs only change weights."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.split import Parts, split
from sdflow.runtime.sessions.submodel import Edit, read_edited

Value = TypeVar("Value")

GRAPHS_KEPT, CUTS_KEPT = 4, 16


class Cuts:
    """Split denoisers, cached by graph contents and sizes. A split graph refers to weights by file offset, so equal
    graphs have equal parts whatever their weights. Thread-safe."""

    def __init__(self) -> None:
        self._graphs: Once[Any] = Once({}, GRAPHS_KEPT)
        self._cut: Once[Parts] = Once({}, CUTS_KEPT)

    def of(
        self, model: Path, sizes: Mapping[str, int], *, moving: Moving, guidance: bool, edits: Sequence[Edit] = ()
    ) -> Parts:
        """Split the graph in this file with the edits applied. Raises like `split`, or VerificationError for an invalid
        file."""
        with model.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()

        def cut() -> Parts:
            graph = self._graphs.get((digest, *edits), lambda: read_edited(model, edits))
            return split(graph, sizes, moving=moving, guidance=guidance)

        return self._cut.get((digest, *edits, tuple(sorted(sizes.items())), moving, guidance), cut)


class Once(Generic[Value]):
    """A cache in which each value is computed by one thread; other threads that want the same key wait for it."""

    def __init__(self, kept: MutableMapping[Hashable, Value], most: int | None = None) -> None:
        """kept: storage. most: maximum number of values, dropping the least recently used; None: no limit."""
        self._lock, self._kept, self._most = threading.Lock(), kept, most
        self._computing: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of this key. Errors of `compute` are raised and not cached."""
        with self._lock:
            computing = self._computing.setdefault(key, threading.Lock())
        with computing:
            with self._lock:
                value = self._kept.pop(key, None)
            if value is None:
                value = compute()
            with self._lock:
                while self._most is not None and len(self._kept) >= self._most:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = value
        return value
