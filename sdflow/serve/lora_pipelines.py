"""A pipeline with LoRAs, made while others are drawn: the same bits as `sdflow bake` gives.

The weights that LoRAs touch are computed from the checkpoint by the recipes of the graph (`sdflow.weights.bind`), never by adding
to weights that are there or taking from them; all others are copied. What no LoRA touches is shared: whole submodels with the
pipeline without LoRAs. The graph itself is the one that the cache has; nothing is exported or fused.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.bake import workflow_of
from sdflow.errors import UsageError
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.plan import BIND_PASS, PipelinePlan, make_plan
from sdflow.serve.jobs import LoraFile
from sdflow.serve.served_pipeline import ServedPipeline
from sdflow.sources import require_same_checkpoint
from sdflow.sources.lora import lora_submodels, require_made_for
from sdflow.store import Cache
from sdflow.weights.lora import LoraInput

COPIES = 2
"""How often a submodel's weights lie in memory, about: a session for every size of batch may pack them for itself."""


@dataclass(frozen=True)
class _Structure:
    """The graph of a submodel without weights, how its checkpoint is loaded, and the pipeline's own LoRAs."""

    folder: Path
    load: Any
    own: tuple[LoraInput, ...]


@dataclass(frozen=True)
class Made:
    """A pipeline with LoRAs, and about how many bytes of weights are its own."""

    loras: tuple[LoraFile, ...]
    pipeline: ServedPipeline
    size: int


class LoraPipelines:
    """The pipeline of a folder with any LoRAs. Those that were asked for last stay, up to so many bytes of weights.

    `make` may be called from another thread than the rest.
    """

    def __init__(self, folder: Path, base: ServedPipeline, cache: Path, memory: int) -> None:
        """Raises UsageError when the folder was built in a way that LoRAs cannot be bound, or its graphs are not in the cache."""
        self._folder, self._base, self._memory = folder, base, memory
        self._plan = _plan(folder, Cache(cache))
        self._structures = _structures(self._plan, Cache(cache), str(cache))
        self._made: dict[tuple[LoraFile, ...], Made] = {}
        self._alive: weakref.WeakValueDictionary[tuple[LoraFile, ...], ServedPipeline] = weakref.WeakValueDictionary()

    def served(self, loras: tuple[LoraFile, ...]) -> ServedPipeline:
        """The pipeline with these, in this order: made if it is not there. Raises CheckpointError for one that does not fit."""
        found = self.get(loras)
        return self.keep(self.make(loras)) if found is None else found

    def get(self, loras: tuple[LoraFile, ...]) -> ServedPipeline | None:
        """The pipeline with these if it is there: kept, or in use."""
        loras = _counting(loras)
        if not loras:
            return self._base
        if loras in self._made:
            self._made[loras] = self._made.pop(loras)
        return self._alive.get(loras)

    def keep(self, made: Made) -> ServedPipeline:
        """Keep one for as long as there is room, and it is asked for more than others."""
        while self._made and made.size + sum(each.size for each in self._made.values()) > self._memory:
            self._made.pop(next(iter(self._made)))
        self._made[made.loras] = made
        self._alive[made.loras] = made.pipeline
        return made.pipeline

    @property
    def kept(self) -> list[tuple[LoraFile, ...]]:
        """Which are there, the last one asked for at the end."""
        return list(self._made)

    def make(self, loras: tuple[LoraFile, ...]) -> Made:
        """The pipeline with these, in this order, which is not there. Raises CheckpointError for one that does not fit."""
        from sdflow.weights.bind import BindRequest, bind

        loras = _counting(loras)
        checkpoint = self._plan.checkpoint
        assert checkpoint is not None, "looked at when it was planned"
        for lora in loras:
            require_made_for(Path(lora.path), checkpoint)
        touched = {name for lora in loras for name in lora_submodels(Path(lora.path)) if name in self._structures}
        scratch = Path(tempfile.mkdtemp(prefix="sdflow-loras-"))
        try:
            for name in touched:
                structure, out = self._structures[name], scratch / name
                out.mkdir()
                inputs = [LoraInput(Path(lora.path), lora.scale) for lora in loras]
                bind(
                    BindRequest(
                        name,
                        structure.folder,
                        structure.load,
                        (*structure.own, *inputs),
                        (self._folder / name).resolve(),
                        base_loras=structure.own,
                    ),
                    out,
                )
            made = self._base.with_submodels(scratch, sorted(touched))
        except BaseException:
            shutil.rmtree(scratch)
            raise
        weakref.finalize(made, shutil.rmtree, scratch, ignore_errors=True)
        size = COPIES * sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        return Made(loras, made, size)


def _counting(loras: Sequence[LoraFile]) -> tuple[LoraFile, ...]:
    """Without those that count nothing."""
    return tuple(lora for lora in loras if lora.scale)


def _plan(folder: Path, cache: Cache) -> PipelinePlan:
    origin = read_manifest(folder).origin
    where = folder / MANIFEST_FILE
    (planned,) = make_plan(workflow_of(where, origin, (), origin.name), cache).pipelines
    if planned.checkpoint is None:
        raise UsageError(
            f"{origin.model} is not on this machine", where=str(where), remedy="Run the pipeline's workflow."
        )
    require_same_checkpoint(planned.checkpoint, origin, str(where))
    return planned


def _structures(plan: PipelinePlan, cache: Cache, where: str) -> dict[str, _Structure]:
    assert plan.checkpoint is not None, "looked at when it was planned"
    family, found = plan.checkpoint.family, {}
    for chain in plan.chains:
        if chain.submodel not in family.with_loras:
            continue
        if chain.steps[-1].name != BIND_PASS:
            raise UsageError(
                f"its {chain.submodel} was built with its weights carried through every pass, so LoRAs cannot be put in later",
                where=plan.pipeline.name,
                remedy="Bake them into pipelines of their own: sdflow bake.",
            )
        planned = {each.step.index: each for each in plan.steps(cache) if each.step.submodel == chain.submodel}
        bind, before = chain.steps[-1], planned[len(chain.steps) - 2]
        if before.record is None:
            raise UsageError(
                f"the graph of {chain.submodel} is not in this cache",
                where=where,
                remedy="Name the cache that the pipeline was built with: --cache DIR. Or run its workflow again with this one.",
            )
        own = tuple(LoraInput(lora.path, lora.scale) for lora in bind.loras)
        found[chain.submodel] = _Structure(before.record.artifact.path.absolute(), bind.load, own)
    return found
