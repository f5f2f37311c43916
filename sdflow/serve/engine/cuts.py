"""Graphs of denoisers, taken apart (`sdflow.runtime.denoiser.split`) once for all that have the same graph: LoRAs
change weights alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.split import Parts, split
from sdflow.runtime.sessions.session import read_graph

GRAPHS_KEPT, CUTS_KEPT = 4, 16


class Cuts:
    """The parts of denoisers by the bytes of their graphs and by size. The parts name the weights that lie beside a graph, and
    say where in the file each is: equal graphs so have equal parts, whatever the weights are. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[str, Any] = {}
        self._cut: dict[tuple[Any, ...], Future[Parts]] = {}

    def of(self, model: Path, sizes: Mapping[str, int], *, moving: Moving, guidance: bool) -> Parts:
        """The parts of the graph in this file. Whoever asks first for some makes them; who asks for others does not wait for
        that. Raises as `split`, VerificationError for what is no graph."""
        with model.open("rb") as file:
            graph = hashlib.file_digest(file, "sha256").hexdigest()
        key = (graph, tuple(sorted(sizes.items())), moving, guidance)
        with self._lock:
            coming = self._cut.pop(key, None)
            if first := coming is None:
                _make_room(self._cut, CUTS_KEPT)
                coming = Future()
            self._cut[key] = coming
        if first:
            self._make(key, coming, lambda: split(self._graph(graph, model), sizes, moving=moving, guidance=guidance))
        return coming.result()

    def _make(self, key: tuple[Any, ...], coming: Future[Parts], make: Callable[[], Parts]) -> None:
        try:
            coming.set_result(make())
        except BaseException as error:
            with self._lock:
                self._cut.pop(key, None)
            coming.set_exception(error)
            raise

    def _graph(self, digest: str, model: Path) -> Any:
        with self._lock:
            if digest in self._graphs:
                return self._graphs[digest]
        graph = read_graph(model)
        with self._lock:
            _make_room(self._graphs, GRAPHS_KEPT)
            self._graphs[digest] = graph
        return graph


def _make_room(kept: dict[Any, Any], most: int) -> None:
    while len(kept) >= most:
        kept.pop(next(iter(kept)))
