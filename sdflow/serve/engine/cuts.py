"""Graphs of denoisers, taken apart (`sdflow.runtime.denoiser.split`) once for all that have the same graph: LoRAs
change weights alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.denoiser.split import Parts, split
from sdflow.runtime.sessions.session import read_graph
from sdflow.serve.engine.once import Once

GRAPHS_KEPT, CUTS_KEPT = 4, 16


class Cuts:
    """The parts of denoisers by the bytes of their graphs and by size. The parts name the weights that lie beside a graph, and
    say where in the file each is: equal graphs so have equal parts, whatever the weights are. For several threads."""

    def __init__(self) -> None:
        self._graphs: Once[Any] = Once({}, GRAPHS_KEPT)
        self._cut: Once[Parts] = Once({}, CUTS_KEPT)

    def of(self, model: Path, sizes: Mapping[str, int], *, moving: Moving, guidance: bool) -> Parts:
        """The parts of the graph in this file. Raises as `split`, VerificationError for what is no graph."""
        with model.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()

        def cut() -> Parts:
            graph = self._graphs.get(digest, lambda: read_graph(model))
            return split(graph, sizes, moving=moving, guidance=guidance)

        return self._cut.get((digest, tuple(sorted(sizes.items())), moving, guidance), cut)
