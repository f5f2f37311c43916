"""The checkpoint that a pipeline's memory is estimated by: its own, or the shipped architecture of one that is not downloaded."""

from __future__ import annotations

from dataclasses import replace

from sdflow.config.workflow import PipelineSpec
from sdflow.disk.shipped import shipped_workflows
from sdflow.families import ARCHITECTURES
from sdflow.inspection.lines import model_of
from sdflow.sources import Checkpoint, CheckpointNotLocal, FileDigests, open_checkpoint


def architecture_of(reference: str) -> str | None:
    """The shipped architecture of a model that a shipped workflow names: the one with the workflow's name, or whose name begins
    so."""
    wanted = reference.partition("@")[0]
    for base in shipped_workflows():
        if model_of(base) == wanted:
            name = base.removeprefix("base/").removesuffix(".yaml").replace("_", "-")
            begin = [each for each in ARCHITECTURES if each.startswith(name) and not each.endswith("-tiny")]
            return name if name in begin else next(iter(begin), None)
    return None


def estimated_by(pipeline: PipelineSpec, digests: FileDigests) -> Checkpoint | None:
    """None where its configs are not known without downloading it. Raises CheckpointError as of `open_checkpoint`."""
    try:
        return open_checkpoint(pipeline.model, digests=digests, download=False, **pipeline.opening)
    except CheckpointNotLocal:
        architecture = architecture_of(pipeline.model)
    if architecture is None:
        return None
    left_out = {name: source for name, source in pipeline.components.items() if source is None}
    alone = replace(pipeline, controlnets={}, ip_adapters=(), components=left_out)
    return open_checkpoint(f"synthetic:{architecture}", digests=digests, download=False, **alone.opening)
