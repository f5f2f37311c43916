"""Check whether a workflow's chains can build its model, for `sdflow validate` and `sdflow plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from sdflow import sources
from sdflow.config.workflow import Mark, PipelineSpec, Workflow
from sdflow.errors import CheckpointError, Problem, UsageError
from sdflow.families import any_family


def input_problems(workflow: Workflow) -> list[Problem]:
    """Problems of a workflow's local models and LoRAs, found from headers and configurations alone."""
    found: dict[Problem, None] = {}
    for pipeline in _with_refiners(workflow):
        try:
            digests = _HeadersAlone()
            checkpoint = sources.open_checkpoint(pipeline.model, digests=digests, download=False, **pipeline.opening)
            require_buildable_model(pipeline, checkpoint)
        except sources.CheckpointNotLocal:
            pass
        except (CheckpointError, UsageError) as error:
            found[_problem(pipeline.model_mark, error)] = None
        for spec in pipeline.loras:
            try:
                sources.lora_submodels(sources.find_lora(spec.reference, spec.weight_name, download=False))
            except sources.CheckpointNotLocal:
                continue
            except CheckpointError as error:
                found[_problem(spec.mark, error)] = None
    return list(found)


def _problem(mark: Mark, error: CheckpointError | UsageError) -> Problem:
    where = f"{error.where}: " if error.where and error.where != str(mark) else ""
    return mark.problem(f"{where}{error.what}", error.remedy)


def require_buildable_model(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises CheckpointError if the checkpoint's family is not the one of the workflow's chains, UsageError if
    submodels are missing from it."""
    known, family = (*any_family.optional_submodels(), *checkpoint.family.lacks), checkpoint.family
    absent = [name for name in pipeline.submodels if name not in checkpoint.submodels and name not in known]
    if others := [name for name in absent if name not in family.submodels]:
        raise CheckpointError(
            f"the checkpoint {pipeline.model} has no {others[0]}: it is of the family {family.title}",
            where=str(pipeline.model_mark),
            remedy=f"Extend the workflow of that family: it has {', '.join(family.submodels)}.",
        )
    if absent:
        raise CheckpointError(
            f"the checkpoint {pipeline.model} holds no {' and no '.join(absent)}, which {family.title} needs",
            where=str(pipeline.model_mark),
            remedy=_remedy(checkpoint),
        )
    _require_parts(pipeline, checkpoint)
    _require_sizes(pipeline, checkpoint)


def _remedy(checkpoint: sources.Checkpoint) -> str:
    """Suggest a source for missing submodels: a file's components can replace those of a whole model."""
    family = checkpoint.family
    held = [name for name in family.exchangeable if family.components[name][0].name in checkpoint.submodels]
    if checkpoint.provenance.get("kind") != "single_file" or len(held) < len(family.exchangeable):
        return "Name a file that holds them too, or the model's folder or repository in diffusers' layout."
    file = checkpoint.provenance["path"]
    return (
        "Name a folder or repository that has them as `model`, and this file for its parts: "
        f"`components: {{{', '.join(f'{name}: {file}' for name in held)}}}`."
    )


def _with_refiners(workflow: Workflow) -> Iterator[PipelineSpec]:
    for pipeline in workflow.pipelines:
        yield pipeline
        if pipeline.refiner is not None:
            yield pipeline.refiner


class _HeadersAlone:
    """FileDigests that reads no weights; checkpoints opened with it have no identity."""

    def digest(self, path: Path) -> str:
        return ""

    def value(self, path: Path, what: str, compute: Callable[[Path], str]) -> str:
        return "" if what.startswith("tensors-") else compute(path)


def _require_parts(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises UsageError if the workflow generates or verifies images without a chain for a required submodel."""
    family = checkpoint.family
    configs = {name: part.load["config"] for name, part in checkpoint.submodels.items()}
    family.require_nets_fit(configs)
    built = set(pipeline.submodels)
    missing = [name for name in family.needed(configs) if name not in built]
    # A workflow of only a few submodels verifies each of them, and generates with none.
    draws = pipeline.verify is not None and {family.denoiser, family.decoder} <= built
    if missing and (draws or pipeline.evaluate.image is not None):
        raise UsageError(
            f"no image can be drawn without {' and '.join(missing)}: {pipeline.model} is of the family {family.title}",
            where=str(pipeline.model_mark),
            remedy="Extend the workflow of that family, or write `evaluate: {image: null}` and `verify: false`.",
        )
    unread = [name for name in family.text_of(checkpoint.submodels) if name not in built]
    if unread and (draws or pipeline.evaluate.image is not None):
        component = family.part(unread[0]).component
        raise UsageError(
            f"{pipeline.model} reads prompts with {unread[0]} too, and the workflow has no chain for it",
            where=str(pipeline.model_mark),
            remedy=f"Add the chain, or build without it: `components: {{{component}: null}}`.",
        )


def _require_sizes(pipeline: PipelineSpec, checkpoint: sources.Checkpoint) -> None:
    """Raises UsageError for an image size that the model's graphs do not support."""
    multiple = checkpoint.facts.get("granularity", 1)  # a checkpoint of only a few submodels has no facts
    for key, spec in (("evaluate.image", pipeline.evaluate.image), ("verify", pipeline.verify)):
        for name in ("height", "width"):
            pixels = getattr(spec, name, None)
            if pixels is not None and pixels % multiple:
                raise UsageError(
                    f"{key}.{name} is {pixels} pixels",
                    where=pipeline.name,
                    remedy=f"Use a multiple of {multiple}: the graphs of {pipeline.model} halve it again and again.",
                )
