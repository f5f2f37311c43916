"""The checkpoint for a pipeline's estimate: its own, or the shipped architecture if it is not downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sdflow.config.workflow import PipelineSpec
from sdflow.disk.shipped import shipped_workflows
from sdflow.families import ARCHITECTURES
from sdflow.inspection.lines import model_of
from sdflow.sources import Checkpoint, CheckpointNotLocal, open_checkpoint


def architecture_of(reference: str) -> str | None:
    """The shipped architecture of a model in a shipped workflow: the one with the workflow's name, or with that
    prefix."""
    wanted = reference.partition("@")[0]
    for base in shipped_workflows():
        if model_of(base) == wanted:
            name = base.removeprefix("base/").removesuffix(".yaml").replace("_", "-")
            begin = [each for each in ARCHITECTURES if each.startswith(name) and not each.endswith("-tiny")]
            return name if name in begin else next(iter(begin), None)
    return None


class UnreadFiles:
    """FileDigests that reads no weights, since an estimate only needs configs. Values other than digests are
    computed."""

    def digest(self, path: Path) -> str:
        """The same dummy digest for every file."""
        return "0" * 64

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        """A dummy value for tensors; otherwise `compute(path)`."""
        return "0" * 64 if what.startswith("tensors") else compute(path)


def estimated_by(pipeline: PipelineSpec) -> Checkpoint | None:
    """The checkpoint; None if its configs require a download. Raises CheckpointError like `open_checkpoint`."""
    try:
        return open_checkpoint(pipeline.model, digests=UnreadFiles(), download=False, **pipeline.opening)
    except CheckpointNotLocal:
        architecture = architecture_of(pipeline.model)
    if architecture is None:
        return None
    left_out = {name: source for name, source in pipeline.components.items() if source is None}
    alone = replace(pipeline, controlnets={}, ip_adapters=(), components=left_out)
    return open_checkpoint(f"synthetic:{architecture}", digests=UnreadFiles(), download=False, **alone.opening)
