"""The layout of a pipeline folder, before any of it is written.

A refiner is a pipeline folder within its base's folder. Artifacts that both share byte for byte are links there, even
in copies, and stored once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sdflow.artifact import CONFIG_FILE, INDEX_FILE, Artifact
from sdflow.build.listener import FinishedStep, Steps
from sdflow.build.plan import PipelinePlan
from sdflow.config.workflow import StepSpec
from sdflow.disk.input_file import read_json
from sdflow.families import FAMILIES
from sdflow.families.shared.base import ONNX_COMPONENT, Family
from sdflow.families.shared.defaults import Task
from sdflow.machine.packages import distribution_version, found_version
from sdflow.manifest import (
    MANIFEST_FILE,
    REFINER,
    Chain,
    FinishedPass,
    Manifest,
    MergedLora,
    Origin,
    Part,
    WrittenPass,
    as_bytes,
)
from sdflow.passes.quantizing import quantization_of
from sdflow.passes.user_pass import is_user_pass
from sdflow.sources.companions import companion_files

T = TypeVar("T")


@dataclass(frozen=True)
class Content:
    """The content of a pipeline.

    parts: submodel -> artifact. companions: the family's -> folder; small, always copied. origin: how they were built,
    for sdflow.json. options: the family's, for model_index.json. changed: companion/file -> JSON that replaces the
    file.
    """

    parts: Mapping[str, Artifact]
    companions: Mapping[str, Path]
    origin: Origin
    options: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """What goes where, by POSIX path. parts: artifacts, each a folder. links: to folders of the same pipeline -> link
    target.
    companions: copied folders. described: files -> their content."""

    manifest: Manifest
    parts: Mapping[str, Artifact]
    links: Mapping[str, str]
    companions: Mapping[str, Path]
    described: Mapping[str, bytes]


def lay_out(content: Content, refiner: Content | None, *, copy: bool) -> Layout:
    """The layout of a pipeline's folder, including its refiner's. copy: submodels are copied, not linked."""
    if refiner is None:
        return _one(content, copy)
    inside = _one(refiner, copy, {} if sys.platform == "win32" else _shared(content, refiner))
    outside = _one(content, copy, more=_within(dict.fromkeys(inside.manifest.files)))
    return Layout(
        outside.manifest,
        {**outside.parts, **_within(inside.parts)},
        _within(inside.links),
        {**outside.companions, **_within(inside.companions)},
        {**outside.described, **_within(inside.described)},
    )


def _shared(content: Content, refiner: Content) -> dict[str, str]:
    """Submodels that the refiner shares with the base -> their path from the refiner's folder."""
    return {
        name: f"../{name}"
        for name, artifact in refiner.parts.items()
        if name in content.parts and content.parts[name].digest == artifact.digest
    }


def _within(found: Mapping[str, T]) -> dict[str, T]:
    return {f"{REFINER}/{name}": each for name, each in found.items()}


def _one(
    content: Content, copy: bool, links: Mapping[str, str] | None = None, more: Mapping[str, Any] | None = None
) -> Layout:
    """The layout of one pipeline. more: additional files."""
    links = links or {}
    parts = {name: artifact for name, artifact in content.parts.items() if name not in links}
    files = [INDEX_FILE, MANIFEST_FILE, *links, *(more or {})]
    for name, folder in content.companions.items():
        files += [f"{name}/{file}" for file in companion_files(folder)]
    for name, artifact in parts.items():
        files += [f"{name}/{entry.path}" for entry in artifact.files] if copy else [name]
    manifest = Manifest(
        content.origin,
        parts={name: Part(artifact.digest, artifact.files) for name, artifact in content.parts.items()},
        files=tuple(sorted(files)),
        copied=copy,
    )
    described = {INDEX_FILE: _index(FAMILIES[content.origin.family], content), MANIFEST_FILE: as_bytes(manifest)}
    described |= {name: _json(each) for name, each in content.changed.items()}
    return Layout(manifest, parts, links, content.companions, described)


def _index(family: Family, content: Content) -> bytes:
    """model_index.json, by which diffusers recognizes the folder."""
    components: dict[str, Any] = {
        "_class_name": family.assembled_as[_task(family, content.parts)],
        "_diffusers_version": _diffusers_version(content.origin),
        **content.options,
    }
    absent = [*family.lacks, *(part.name for part in family.parts if part.optional)]
    absent += [
        name
        for name, companion in family.companions.items()
        if any(part in family.submodels for part in companion.parts)
    ]
    components.update({name: [None, None] for name in absent})
    if family.checker is not None:
        components["requires_safety_checker"] = family.checker in content.parts
    for name, folder in content.companions.items():
        # Old checkpoints name classes that transformers 5 has removed.
        companion = family.companions[name]
        config = content.changed.get(f"{name}/{companion.file}")
        named = companion.class_name or (
            _named_class(folder / companion.file) if config is None else config["_class_name"]
        )
        components[name] = [companion.library, named]
    components.update(dict.fromkeys(content.parts, ONNX_COMPONENT))
    return _json(components)


def _diffusers_version(origin: Origin) -> str:
    """The installed version, or else the one that made the graphs."""
    made_with = (step.uses.get("diffusers") for chain in origin.chains.values() for step in chain.steps)
    return found_version("diffusers") or next(filter(None, made_with), None) or distribution_version("diffusers")


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _task(family: Family, parts: Mapping[str, Artifact]) -> Task:
    """The task, from the readable configs: verifying or loading reports broken ones."""
    configs = {}
    for name, artifact in parts.items():
        with suppress(OSError, ValueError):
            configs[name] = json.loads((artifact.path / CONFIG_FILE).read_bytes())
    return family.task(configs)


def _named_class(file: Path) -> str:
    config = read_json(file, finite=False)
    return str(config["_class_name"])


def of_refiner(steps: Steps) -> Steps:
    """The steps of a pipeline's refiner, by the refiner's submodel names."""
    begins = f"{REFINER}/"
    return {name.removeprefix(begins): chain for name, chain in steps.items() if name.startswith(begins)}


def content_of(plan: PipelinePlan, steps: Steps, *, verified: str | None) -> Content:
    """The content of a pipeline folder whose steps are finished. verified: the level that it passed, or must pass
    before it is published; None: not verified."""
    assert plan.checkpoint is not None, "planned with download=True"
    return Content(
        {chain.submodel: steps[chain.submodel][-1].record.artifact for chain in plan.chains},
        plan.checkpoint.companions,
        replace(origin_of(plan, steps), verified=verified),
        plan.checkpoint.options,
        plan.checkpoint.changed_companions(),
    )


def origin_of(plan: PipelinePlan, steps: Steps) -> Origin:
    """Where each file of a pipeline comes from, with the facts measured on it."""
    pipeline = plan.pipeline
    loras = (
        MergedLora(lora.reference, spec.weight_name, lora.sha256, lora.scale, lora.commit)
        for spec, lora in zip(pipeline.loras, plan.loras, strict=True)
    )
    return Origin(
        name=pipeline.name,
        target=pipeline.target,
        model=pipeline.model,
        checkpoint=plan.checkpoint.provenance if plan.checkpoint else None,
        allow_pickle=pipeline.allow_pickle,
        carry_weights=pipeline.carry_weights,
        loras=tuple(loras),
        chains={
            submodel: Chain(
                tuple(_as_written(spec) for spec in pipeline.submodels[submodel]),
                tuple(map(_as_run, chain)),
                quantization_of([(each.step.implementation, each.step.config, each.record.facts) for each in chain]),
            )
            for submodel, chain in steps.items()
            if submodel in pipeline.submodels
        },
        components=pipeline.components,
        controlnets=pipeline.controlnets,
        ip_adapters=tuple(adapter.to_json() for adapter in pipeline.ip_adapters),
        generate=pipeline.generate,
        few_steps=plan.few_steps,
        refiner=None if pipeline.refiner is None else REFINER,
        left_out=tuple(sorted({*plan.checkpoint.submodels} - {*steps})) if plan.checkpoint else None,
        **({"family": plan.checkpoint.family.name} if plan.checkpoint else {}),
    )


def _as_written(spec: StepSpec) -> WrittenPass:
    """A step as the workflow has it, for `sdflow.run.bake`; the path of a user's pass is made absolute."""
    name = str((spec.folder / spec.pass_name).absolute()) if is_user_pass(spec.pass_name) else spec.pass_name
    return WrittenPass(name, dict(spec.options))


def _as_run(result: FinishedStep) -> FinishedPass:
    step = result.step
    return FinishedPass(step.name, result.record.action.digest, step.config, step.uses, result.record.facts)
