"""Describe whether a planned pipeline fits a device, for `sdflow plan` and `sdflow doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil

from sdflow.build.plan import PipelinePlan
from sdflow.config import load_workflow
from sdflow.config.workflow import PipelineSpec
from sdflow.disk.shipped import shipped_workflow
from sdflow.fits.estimate import CONTEXT, MemoryNeed, Way, memory_need, with_refiner
from sdflow.fits.known import estimated_by
from sdflow.machine.device_memory import Card, card
from sdflow.machine.memory import HOST
from sdflow.passes.registry import catalog
from sdflow.sources import Checkpoint
from sdflow.units import spell_bytes

_USUAL = ("sd15", "sdxl", "sd35_medium", "flux2_klein", "z_image_turbo", "flux1_schnell")
"""Shipped workflows, one per family, for the doctor."""


@dataclass(frozen=True)
class Device:
    """Memory for generating. given: bytes from the user; otherwise those of `card`, or for the CPU the machine's."""

    given: int | None
    card: Card | None

    def bytes_for(self, target: str) -> int | None:
        """Bytes of memory; None if unknown."""
        if self.given is not None:
            return self.given
        if target == HOST:
            return int(psutil.virtual_memory().total)
        return None if self.card is None else self.card.memory

    def words_for(self, target: str) -> str:
        """The memory's owner and size, in words."""
        size = self.bytes_for(target)
        if size is None:
            return "this machine's card is unknown"
        whose = "" if self.given is not None else "this machine's " if target == HOST else f"{self.card.name}'s "  # type: ignore[union-attr]
        return f"{whose}{spell_bytes(size)}"


@dataclass(frozen=True)
class Fit:
    """A pipeline on a device. need: None if the model's size is unknown; why: the reason."""

    need: MemoryNeed | None
    device: Device
    target: str
    why: str = ""

    @property
    def way(self) -> Way | None:
        """How it fits; None if it does not, or is unknown."""
        available = self.device.bytes_for(self.target)
        return None if self.need is None or available is None else self.need.way(available)

    @property
    def words(self) -> str:
        """The fit, in one line."""
        kind = "memory" if self.target == HOST else "device memory"
        if self.need is None:
            return f"{kind}: unknown, {self.why}"
        resident, turns = (spell_bytes(self.need.peak(way)) for way in ("resident", "turns"))
        size = f"{self.need.size}x{self.need.size}"
        option = "--low-memory" if self.need.low_memory else "--keep fit"
        says = f"{kind}: about {resident} for {size} with all weights resident, {turns} with {option}"
        if self.need.unknown:
            says += f", without {', '.join(self.need.unknown)}, whose size is unknown"
        available, whose = self.device.bytes_for(self.target), self.device.words_for(self.target)
        if available is None:
            return f"{says}; {whose}: use --device-memory SIZE to check whether it fits"
        return f"{says}; {self._verdict(available, whose)}"

    def _verdict(self, available: int, whose: str) -> str:
        assert self.need is not None
        if self.way == "resident":
            option = "" if self.need.low_memory or self.need.keeps_all(available) else " with --keep all"
            return f"fits{option} in {whose}"
        if self.way == "turns":
            limit = f" --device-memory {(available - CONTEXT) // 10**6}MB" if self.device.given is not None else ""
            option = "--low-memory" if self.need.low_memory else f"--keep fit{limit}"
            return f"fits with {option} in {whose}"
        if self.way == "streamed":
            limit = f" --device-memory {(available - CONTEXT) // 10**6}MB" if self.device.given is not None else ""
            return f"fits with --keep fit{limit} in {whose}, which {self.need.streaming_in_words(available)}"
        return f"does not fit in {whose}; `sdflow init --fits` chooses smaller weights"

    def as_json(self) -> dict[str, Any]:
        """JSON for `plan --json`: bytes, None if unknown."""
        need = self.need
        return {
            "resident": None if need is None else need.peak("resident"),
            "turns": None if need is None else need.peak("turns"),
            "streamed": None if need is None or "streamed" not in need.ways else need.peak("streamed"),
            "weights": None if need is None else {name: each.weights for name, each in need.submodels.items()},
            "available": self.device.bytes_for(self.target),
            "fits": self.way,
        }


def device_for(given: int | None) -> Device:
    """The requested device: this many bytes, or this machine's card."""
    return Device(given, None if given is not None else card())


def fit_of(plan: PipelinePlan, device: Device) -> Fit:
    """The fit of a planned pipeline with its refiner."""
    target = plan.pipeline.target
    checkpoint = plan.checkpoint or estimated_by(plan.pipeline)
    if checkpoint is None:
        return Fit(None, device, target, "since the model is not downloaded yet")
    need = _need(plan.pipeline, checkpoint)
    if need is not None and plan.refiner is not None:
        refiner = plan.refiner.checkpoint or estimated_by(plan.refiner.pipeline)
        added = None if refiner is None else _need(plan.refiner.pipeline, refiner)
        need = None if added is None else with_refiner(need, added)
    return Fit(need, device, target, "since a config of the model lacks entries")


def usual_fits(device: Device) -> Iterator[tuple[str, Fit]]:
    """Name and fit of shipped workflows, one per family, on a device."""
    for name in _USUAL:
        pipeline = _shipped(name)
        checkpoint = estimated_by(pipeline)
        if checkpoint is not None:
            yield name, Fit(_need(pipeline, checkpoint), device, pipeline.target)


@cache
def _shipped(name: str) -> PipelineSpec:
    path = shipped_workflow(f"base/{name}.yaml")
    assert path is not None
    return load_workflow(path, catalog=catalog(), targets=["cuda"]).pipelines[0]


def _need(pipeline: PipelineSpec, checkpoint: Checkpoint) -> MemoryNeed | None:
    try:
        return memory_need(pipeline, checkpoint)
    except (KeyError, TypeError):
        return None
