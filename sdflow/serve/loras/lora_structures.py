"""Read from the cache which graphs and weights LoRAs apply to, without loading the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdflow.build.chain import BIND_PASS
from sdflow.build.plan import make_plan
from sdflow.errors import CheckpointError, UsageError
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.run.bake import workflow_of
from sdflow.serve.loras.live_loras import Structure
from sdflow.sources import Checkpoint, require_same_checkpoint
from sdflow.sources.loras.lora import read_lora, require_made_for
from sdflow.store import Cache
from sdflow.weights.lora import LoraInput

Read = tuple[Checkpoint, dict[str, Structure]]


def read_structures(folder: Path, cache: Path) -> Read:
    """Return a pipeline's checkpoint, and the graphs that LoRAs apply to by submodel. Raises UsageError if the pipeline
    was built in a way that cannot take LoRAs, or its graphs are not in the cache."""
    origin, where, store = read_manifest(folder).origin, folder / MANIFEST_FILE, Cache(cache)
    (plan,) = make_plan(workflow_of(where, origin, (), origin.name), store).pipelines
    checkpoint = plan.checkpoint
    if checkpoint is None:
        raise UsageError(
            f"{origin.model} is not on this machine",
            where=str(where),
            remedy="Run the pipeline's workflow to download it.",
        )
    require_same_checkpoint(checkpoint, origin, str(where))
    found = {}
    for chain in plan.chains:
        if chain.submodel not in checkpoint.family.with_loras:
            continue
        if chain.steps[-1].name != BIND_PASS:
            raise UsageError(
                f"the weights of its {chain.submodel} were carried through every pass, so LoRAs cannot be added later",
                where=plan.pipeline.name,
                remedy="Bake them into separate pipelines with `sdflow bake`.",
            )
        planned = {each.step.index: each for each in plan.steps(store) if each.step.submodel == chain.submodel}
        bind, before = chain.steps[-1], planned[len(chain.steps) - 2]
        if before.record is None:
            raise UsageError(
                f"the graph of {chain.submodel} is not in this cache",
                where=str(cache),
                remedy="Pass the cache that the pipeline was built with (--cache DIR), or run its workflow again with this one.",
            )
        own = tuple(LoraInput(lora.path, lora.scale) for lora in bind.loras)
        found[chain.submodel] = Structure(chain.submodel, before.record.artifact.path.absolute(), bind.load, own)
    return checkpoint, found


class LoraFit:
    """Checks whether a LoRA fits a pipeline of the server. Pipelines may come and go. Thread-safe."""

    def __init__(self, models: Mapping[str, Any], cache: Path) -> None:
        """models: with a `folder` each. cache: the cache that they were built with."""
        self._models, self._cache = models, cache
        self._read: dict[tuple[Path, int], Read] = {}

    def require(self, path: Path) -> None:
        """Raise CheckpointError if the file fits none of the pipelines, UsageError if none of them takes LoRAs."""
        problems: list[CheckpointError | UsageError] = []
        for model in list(self._models.values()):
            try:
                key = model.folder, (model.folder / MANIFEST_FILE).stat().st_mtime_ns
                if key not in self._read:  # concurrent callers may both read it: same result
                    self._read[key] = read_structures(model.folder, self._cache)
                checkpoint, structures = self._read[key]
                require_made_for(path, checkpoint)
                read_lora(path, {each: found.parameters for each, found in structures.items()}, checkpoint.family.name)
            except (CheckpointError, UsageError) as error:
                problems.append(error)
            else:
                return
        fitting = [each for each in problems if isinstance(each, CheckpointError)]  # more specific than UsageError
        if problems:
            raise (fitting or problems)[0]
