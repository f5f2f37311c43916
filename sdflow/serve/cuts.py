"""Graphs of denoisers, taken apart (`sdflow.runtime.split`) once for all that have the same graph: LoRAs change weights alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.runtime.sessions import read_graph
from sdflow.runtime.split import Parts, split

GRAPHS_KEPT, CUTS_KEPT = 4, 16


class Cuts:
    """The parts of denoisers by the bytes of their graphs and by size. The parts name the weights that lie beside a graph, and
    say where in the file each is: equal graphs so have equal parts, whatever the weights are. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[str, Any] = {}
        self._cut: dict[tuple[Any, ...], Parts] = {}

    def of(self, model: Path, sizes: Mapping[str, int], *, guidance: bool) -> Parts:
        """The parts of the graph in this file. Raises as `split`, VerificationError for what is no graph."""
        with model.open("rb") as file:
            graph = hashlib.file_digest(file, "sha256").hexdigest()
        key = (graph, tuple(sorted(sizes.items())), guidance)
        with self._lock:
            if key not in self._cut:
                if graph not in self._graphs:
                    _make_room(self._graphs, GRAPHS_KEPT)
                    self._graphs[graph] = read_graph(model)
                made = split(self._graphs[graph], sizes, guidance=guidance)
                _make_room(self._cut, CUTS_KEPT)
                self._cut[key] = made
            self._cut[key] = self._cut.pop(key)
            return self._cut[key]


def _make_room(kept: dict[Any, Any], most: int) -> None:
    while len(kept) >= most:
        kept.pop(next(iter(kept)))
