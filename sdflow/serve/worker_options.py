"""What the process that draws is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sdflow.store.default import default_cache


@dataclass(frozen=True)
class WorkerOptions:
    """pipelines: folders by name. batch_sizes: images of a batch; None: those that a measurement finds worth it. threads: of
    the CPU. checker: whether the safety checkers see the images. cache: that the pipelines were built with; lora_memory: bytes
    of weights with LoRAs that are kept; loras: whether requests will name some. lanes: how many images are drawn side by side,
    each by its part of the CPU's threads; None: as a measurement finds best. deadline: seconds of a request. stall: seconds after
    which an image that does not go on is given up, and the process with it; None: as follows from a measurement. embeddings: a
    folder of textual inversion files."""

    pipelines: Mapping[str, Path]
    batch_sizes: tuple[int, ...] | None = None
    threads: int | None = None
    checker: bool = True
    cache: Path = field(default_factory=default_cache)
    lora_memory: int = 4 << 30
    loras: bool = False
    lanes: int | None = None
    deadline: float = 600.0
    stall: float | None = None
    embeddings: Path | None = None
