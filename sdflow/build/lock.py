"""`WORKFLOW.lock`: the inputs that a workflow was locked to, so that a build takes those or none.

What a repository of the hub was when the lock was written is loaded by its commit. Everything else is compared: the content of
files, the user's scripts, the versions of the packages that are part of cache keys, and the steps.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sdflow.build.inputs import inputs_of, packages_of, scripts_of
from sdflow.build.plan import PipelinePlan, Plan, make_plan
from sdflow.build.step import Step
from sdflow.config.workflow import PipelineSpec, Workflow
from sdflow.digest import digest_file, digest_json
from sdflow.disk.atomic_write import write_whole
from sdflow.disk.input_file import read_json
from sdflow.disk.shipped import shipped_workflow
from sdflow.errors import CheckpointError, UsageError, first_problem, os_errors_as
from sdflow.sources.reference import HubReference, LocalReference, parse_reference
from sdflow.store import Cache

FORMAT_VERSION = 1
MOST_TOLD = 5
"""Differences that a message names."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class LockedInput(_Form):
    """A model, a component or a LoRA."""

    commit: Annotated[Commit | None, Field(description="Commit of the hub's repository.")] = None
    files: Annotated[dict[str, Digest], Field(description="File -> SHA-256 of its content.")] = {}


class LockedChain(_Form):
    """What a submodel is made of and by."""

    checkpoint: Annotated[Digest, Field(description="SHA-256 of what identifies its weights and configuration.")]
    steps: Annotated[list[str], Field(description="Pass, its version, and SHA-256 of its options with all defaults.")]


class LockedPipeline(_Form):
    """A pipeline of the workflow, or its refiner."""

    target: str
    model: str
    loras: Annotated[list[str], Field(description="Reference and scale.")] = []
    submodels: dict[str, LockedChain]


class Lock(_Form):
    """The content of `WORKFLOW.lock`, which `sdflow lock` writes."""

    format_version: Literal[1] = FORMAT_VERSION
    inputs: Annotated[dict[str, LockedInput], Field(description="By reference; paths are relative to the lock.")]
    scripts: Annotated[dict[str, Digest], Field(description="Scripts of passes and what they import -> SHA-256.")] = {}
    packages: Annotated[dict[str, str], Field(description="Versions that are part of cache keys.")]
    pipelines: dict[str, LockedPipeline]

    def commits(self) -> dict[str, str]:
        """Reference to the hub -> the same at its commit."""
        return {name: _at(name, each.commit) for name, each in self.inputs.items() if each.commit is not None}

    def at_commits(self) -> Lock:
        """The same with every reference to the hub at its commit, as a pinned workflow has it."""
        commits = self.commits()
        inputs: dict[str, LockedInput] = {}
        for name, each in self.inputs.items():
            _add(inputs, commits.get(name, name), each)
        return self.model_copy(
            update={
                "inputs": inputs,
                "pipelines": {
                    name: each.model_copy(
                        update={
                            "model": commits.get(each.model, each.model),
                            "loras": [_pinned_lora(lora, commits) for lora in each.loras],
                        }
                    )
                    for name, each in self.pipelines.items()
                },
            }
        )


def lock_path(workflow: Path) -> Path:
    """Beside the workflow; in the working directory for one that ships with sdflow."""
    lock = Path(f"{workflow.name}.lock")
    return lock if _ships(workflow) else _shown(workflow.with_name(lock.name))


def _ships(workflow: Path) -> bool:
    return shipped_workflow(f"base/{workflow.name}") == workflow


def _shown(path: Path) -> Path:
    """From the working directory where it lies in that: messages name it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _command(workflow: Path) -> str:
    """What writes the lock of a workflow."""
    return f"sdflow lock {workflow.stem if _ships(workflow) else shlex.quote(str(_shown(workflow)))}"


def write_lock(workflow: Workflow, cache: Cache) -> tuple[Path, Lock]:
    """Lock a workflow to its inputs as they are now; what is on the hub is downloaded."""
    path = lock_path(workflow.path)
    lock = lock_of(make_plan(workflow, cache, download=True), path.parent)
    with os_errors_as("the lock cannot be written", path):
        write_whole(path, (json.dumps(lock.model_dump(exclude_none=True), indent=2, sort_keys=True) + "\n").encode())
    return path, lock


def read_lock(workflow: Path) -> Lock:
    """The lock of a workflow. Raises UsageError where it is missing or is none."""
    path = lock_path(workflow)
    remedy = f"Write it: {_command(workflow)}"
    try:
        return Lock.model_validate(read_json(path))
    except OSError as error:
        what = "there is no lock" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise UsageError(what, where=str(path), remedy=remedy) from error
    except ValidationError as error:
        raise UsageError(f"is no lock: {first_problem(error)}", where=str(path), remedy=remedy) from error
    except ValueError as error:
        raise UsageError(f"is no lock: {error}", where=str(path), remedy=remedy) from error


def pin(workflow: Workflow, lock: Lock) -> Workflow:
    """The workflow with its references to the hub at the locked commits. Raises UsageError for one that is not in the lock:
    nothing of it is downloaded."""
    commits = lock.commits()

    def at(reference: str) -> str:
        if reference in commits:
            return commits[reference]
        try:
            unknown = isinstance(parse_reference(reference), HubReference)
        except CheckpointError:  # it is told when it is opened
            unknown = False
        if unknown:
            raise _refused(workflow.path, [f"{reference} is not in the lock"])
        return reference

    def pinned(spec: PipelineSpec) -> PipelineSpec:
        return replace(
            spec,
            model=at(spec.model),
            components={name: each and at(each) for name, each in spec.components.items()},
            controlnets={name: at(each) for name, each in spec.controlnets.items()},
            ip_adapters=tuple(
                replace(each, file=at(each.file), encoder=each.encoder and at(each.encoder))
                for each in spec.ip_adapters
            ),
            loras=tuple(replace(each, reference=at(each.reference)) for each in spec.loras),
            refiner=spec.refiner and pinned(spec.refiner),
        )

    return replace(workflow, pipelines=tuple(map(pinned, workflow.pipelines)))


def locked_plan(workflow: Workflow, cache: Cache, *, download: bool = False) -> Plan:
    """The plan of a workflow from the inputs in its lock. Raises UsageError, naming what differs, where they are not those."""
    lock = read_lock(workflow.path)
    plan = make_plan(pin(workflow, lock), cache, download=download)
    require_locked(plan, lock)
    return plan


def require_locked(plan: Plan, lock: Lock) -> None:
    """Raises UsageError, naming what differs, where a plan, made of a pinned workflow, is not what is locked."""
    path = lock_path(plan.workflow.path)
    if found := list(differences(lock_of(plan, path.parent), lock.at_commits())):
        raise _refused(plan.workflow.path, found)


def lock_of(plan: Plan, folder: Path) -> Lock:
    """What a plan would be locked to. folder: of the lock. Raises CheckpointError for a model that is not on this machine."""
    inputs: dict[str, LockedInput] = {}
    scripts: dict[str, str] = {}
    packages: dict[str, str] = {}
    pipelines = {}
    for each in plan.every:
        if each.checkpoint is None or len(each.loras) < len(each.pipeline.loras):
            raise CheckpointError(
                "its model or a LoRA is not on this machine",
                where=each.pipeline.name,
                remedy="`sdflow run` downloads it.",
            )
        for one in inputs_of(each):
            _add(inputs, _spelled(one.reference, folder), LockedInput(commit=one.commit, files=one.files))
        scripts |= {_relative(path, folder): digest_file(path) for path in scripts_of(each)}
        packages |= packages_of(each)
        pipelines[each.pipeline.name] = _locked(each, folder)
    return Lock(inputs=inputs, scripts=scripts, packages=packages, pipelines=pipelines)


def _locked(plan: PipelinePlan, folder: Path) -> LockedPipeline:
    assert plan.checkpoint is not None
    return LockedPipeline(
        target=plan.pipeline.target,
        model=_spelled(plan.pipeline.model, folder),
        loras=[f"{_spelled(lora.reference, folder)} {lora.scale:g}" for lora in plan.loras],
        submodels={
            chain.submodel: LockedChain(
                checkpoint=digest_json(plan.checkpoint.submodels[chain.submodel].identity),
                steps=[_step(step, folder) for step in chain.steps],
            )
            for chain in plan.chains
        },
    )


def _step(step: Step, folder: Path) -> str:
    name, colon, member = step.name.partition(":")
    if step.user_scripts:
        name = _relative(step.folder / name, folder)
    return f"{name}{colon}{member} {step.implementation.version} {digest_json(step.config)}"


def differences(found: Lock, locked: Lock) -> Iterator[str]:
    """What is otherwise than locked, in words. What is locked and not asked for is no difference: one target of several."""
    for name, one in found.inputs.items():
        other = locked.inputs.get(name)
        if other is None:
            yield f"{name} is not in the lock"
            continue
        if one.commit != other.commit:
            yield f"{name} is at commit {one.commit}, and locked at {other.commit}"
        for file, sha256 in one.files.items():
            if file not in other.files:
                yield f"{name}: the file {file} is not in the lock"
            elif other.files[file] != sha256:
                inner = "" if name.endswith(file) else f": {file}"
                yield f"{name}{inner} has changed: SHA-256 {sha256}, locked {other.files[file]}"
    for what, here, there in (
        ("script", found.scripts, locked.scripts),
        ("package", found.packages, locked.packages),
    ):
        for name, value in here.items():
            if name not in there:
                yield f"the {what} {name} is not in the lock"
            elif there[name] != value:
                yield f"the {what} {name} is {value}, and locked as {there[name]}"
    for name, pipeline in found.pipelines.items():
        if name not in locked.pipelines:
            yield f"the pipeline {name} is not in the lock, only {', '.join(locked.pipelines)}"
        else:
            yield from _of_pipeline(name, pipeline, locked.pipelines[name])


def _of_pipeline(name: str, found: LockedPipeline, locked: LockedPipeline) -> Iterator[str]:
    for key in ("target", "model", "loras"):
        here, there = getattr(found, key), getattr(locked, key)
        if here != there:
            yield f"{name}: {key} {_words(here)}, and locked as {_words(there)}"
    if [*found.submodels] != [*locked.submodels] and {*found.submodels} != {*locked.submodels}:
        yield f"{name}: it builds {', '.join(found.submodels)}, and locked are {', '.join(locked.submodels)}"
    for submodel in found.submodels.keys() & locked.submodels.keys():
        one, other = found.submodels[submodel], locked.submodels[submodel]
        if one.checkpoint != other.checkpoint:
            yield f"{name}/{submodel}: its weights or its configuration have changed"
        for index, (step, before) in enumerate(zip(one.steps, other.steps, strict=False)):
            if step != before:
                same = step.split()[:-1] == before.split()[:-1]
                yield f"{name}/{submodel}/{index}: {step.rpartition(' ')[0]}" + (
                    " has other options than are locked" if same else f", and locked is {before.rpartition(' ')[0]}"
                )
        if len(one.steps) != len(other.steps):
            yield f"{name}/{submodel}: {len(one.steps)} steps, and locked are {len(other.steps)}"


def _words(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " + ".join(value) or "none"


def _refused(workflow: Path, found: list[str]) -> UsageError:
    more = [f"and {len(found) - MOST_TOLD} more"] if len(found) > MOST_TOLD else []
    return UsageError(
        "\n".join(["not what is locked:", *(f"  {each}" for each in (*found[:MOST_TOLD], *more))]),
        where=str(lock_path(workflow)),
        remedy=f"Put back what is locked, or renew the lock: {_command(workflow)}",
    )


def _add(inputs: dict[str, LockedInput], name: str, found: LockedInput) -> None:
    """A reference may stand in several places, and another part of its files be read for each."""
    known = inputs.get(name, found)
    inputs[name] = LockedInput(commit=found.commit, files={**known.files, **found.files})


def _at(reference: str, commit: str) -> str:
    return f"{reference.partition('@')[0]}@{commit}"


def _pinned_lora(lora: str, commits: Mapping[str, str]) -> str:
    reference, _, scale = lora.rpartition(" ")
    return f"{commits.get(reference, reference)} {scale}"


def _spelled(reference: str, folder: Path) -> str:
    parsed: Any = parse_reference(reference)
    if not isinstance(parsed, LocalReference):
        return reference
    return _relative(parsed.path, folder) + (f"#{parsed.architecture}" if parsed.architecture else "")


def _relative(path: Path, folder: Path) -> str:
    """Relative where it can be: the project is then the same in another place."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # Windows: two drives
        return path.as_posix()
