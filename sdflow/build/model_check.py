"""Whether a workflow's model is one that its chains can build: what `sdflow validate` and `sdflow plan` refuse alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from sdflow import sources
from sdflow.config.workflow import PipelineSpec, Workflow
from sdflow.errors import CheckpointError, Problem, UsageError
from sdflow.families import DRAWING, OPTIONAL


def model_problems(workflow: Workflow) -> list[Problem]:
    """What is wrong with the models of a workflow that are on this machine, from their headers and configurations alone."""
    found: dict[Problem, None] = {}
    for pipeline in _with_refiners(workflow):
        mark = pipeline.model_mark
        try:
            checkpoint = sources.open_checkpoint(
                pipeline.model,
                digests=_HeadersAlone(),
                download=False,
                allow_pickle=pipeline.allow_pickle,
                components=pipeline.components,
                nets=pipeline.controlnets,
                adapters=pipeline.ip_adapters,
            )
            require_buildable_model(pipeline, checkpoint)
        except sources.CheckpointNotLocal:
            continue
        except (CheckpointError, UsageError) as error:
            where = f"{error.where}: " if error.where and error.where != str(mark) else ""
            found[Problem(mark.file, mark.line, mark.column, f"{where}{error.what}", error.remedy)] = None
    return list(found)


def require_buildable_model(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises CheckpointError for a checkpoint of another family than the workflow's chains are for, UsageError for one that
    they are not enough for."""
    known = (*OPTIONAL, *checkpoint.family.lacks)
    for submodel in pipeline.submodels:
        if submodel not in checkpoint.submodels and submodel not in known:
            raise CheckpointError(
                f"the checkpoint {pipeline.model} has no {submodel}: it is of the family {checkpoint.family.title}",
                where=str(pipeline.model_mark),
                remedy=f"Extend the workflow of that family: it has {', '.join(checkpoint.family.submodels)}.",
            )
    _require_parts(pipeline, checkpoint)
    _require_sizes(pipeline, checkpoint)


def _with_refiners(workflow: Workflow) -> Iterator[PipelineSpec]:
    for pipeline in workflow.pipelines:
        yield pipeline
        if pipeline.refiner is not None:
            yield pipeline.refiner


class _HeadersAlone:
    """FileDigests that reads no weights: what is opened with it has no identity."""

    def digest(self, path: Path) -> str:
        return ""

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        return "" if what.startswith("tensors-") else compute(path)


def _require_parts(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises UsageError when the workflow draws or verifies, and has no chain for a submodel that this takes."""
    family = checkpoint.family
    configs = {name: part.load["config"] for name, part in checkpoint.submodels.items()}
    family.require_nets_fit(configs)
    missing = [name for name in family.needed(configs) if name not in pipeline.submodels]
    wanted = pipeline.evaluate.image is not None or pipeline.verify is not None
    if missing and wanted and set(DRAWING) <= set(pipeline.submodels):
        raise UsageError(
            f"no image can be drawn without {' and '.join(missing)}: {pipeline.model} is of the family {family.title}",
            where=pipeline.name,
            remedy="Extend the workflow of that family, or write `evaluate: {image: null}` and `verify: false`.",
        )


def _require_sizes(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises UsageError for a size of an image that the model's graphs cannot have."""
    multiple = checkpoint.facts.get("granularity", 1)  # a checkpoint of a few submodels has no facts, and draws nothing
    for key, spec in (("evaluate.image", pipeline.evaluate.image), ("verify", pipeline.verify)):
        for name in ("height", "width"):
            pixels = getattr(spec, name, None)
            if pixels is not None and pixels % multiple:
                raise UsageError(
                    f"{key}.{name} is {pixels} pixels",
                    where=pipeline.name,
                    remedy=f"Take a multiple of {multiple}: the graphs of {pipeline.model} halve it again and again.",
                )
