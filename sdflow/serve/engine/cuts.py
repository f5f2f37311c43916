"""Graphs of denoisers, split once for all pipelines with the same graph: LoRAs change weights alone."""

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
    """The parts of denoisers by the bytes of their graphs and by size. The parts name the weights that lie beside a graph, and
    say where in the file each is: equal graphs so have equal parts, whatever the weights are. For several threads."""

    def __init__(self) -> None:
        self._graphs: Once[Any] = Once({}, GRAPHS_KEPT)
        self._cut: Once[Parts] = Once({}, CUTS_KEPT)

    def of(
        self, model: Path, sizes: Mapping[str, int], *, moving: Moving, guidance: bool, edits: Sequence[Edit] = ()
    ) -> Parts:
        """The parts of the graph in this file, changed by these edits. Raises as `split`, VerificationError for what is no
        graph."""
        with model.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()

        def cut() -> Parts:
            graph = self._graphs.get((digest, *edits), lambda: read_edited(model, edits))
            return split(graph, sizes, moving=moving, guidance=guidance)

        return self._cut.get((digest, *edits, tuple(sorted(sizes.items())), moving, guidance), cut)


class Once(Generic[Value]):
    """Values by key, each computed by one thread, for which those wait that want the same key."""

    def __init__(self, kept: MutableMapping[Hashable, Value], most: int | None = None) -> None:
        """kept: where they stay. most: how many, the last ones asked for; None: any number."""
        self._lock, self._kept, self._most = threading.Lock(), kept, most
        self._computing: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The value of this key. Raises what `compute` raises, each time anew."""
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
