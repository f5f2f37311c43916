"""`WORKFLOW.lock`: pins a workflow's inputs, so that builds use exactly those or fail.

Hub repositories are loaded at their locked commit. Everything else is compared: file content, user scripts, package
versions in cache keys, and the steps.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sdflow.build.inputs import inputs_of, packages_of, scripts_of
from sdflow.build.lock_content import Lock, LockedChain, LockedInput, LockedPipeline, add_input, differences
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

MOST_TOLD = 5
"""Maximum differences that a message names."""


def lock_path(workflow: Path) -> Path:
    """The lock's path: next to the workflow; in the working directory for a shipped workflow."""
    lock = Path(f"{workflow.name}.lock")
    return lock if _ships(workflow) else _shown(workflow.with_name(lock.name))


def _ships(workflow: Path) -> bool:
    return shipped_workflow(f"base/{workflow.name}") == workflow


def _shown(path: Path) -> Path:
    """The path for messages: relative if it is in the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _command(workflow: Path) -> str:
    """The command that writes the lock of a workflow."""
    return f"sdflow lock {workflow.stem if _ships(workflow) else shlex.quote(str(_shown(workflow)))}"


def write_lock(workflow: Workflow, cache: Cache) -> tuple[Path, Lock]:
    """Lock a workflow to its current inputs, downloading those on the hub."""
    path = lock_path(workflow.path)
    lock = lock_of(make_plan(workflow, cache, download=True), path.parent)
    with os_errors_as("the lock cannot be written", path):
        write_whole(path, (json.dumps(lock.model_dump(exclude_none=True), indent=2, sort_keys=True) + "\n").encode())
    return path, lock


def read_lock(workflow: Path) -> Lock:
    """Read the lock of a workflow. Raises UsageError if it is missing or invalid."""
    path = lock_path(workflow)
    remedy = f"Write it: {_command(workflow)}"
    try:
        return Lock.model_validate(read_json(path))
    except OSError as error:
        what = "there is no lock" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise UsageError(what, where=str(path), remedy=remedy) from error
    except ValidationError as error:
        raise UsageError(f"is not a valid lock: {first_problem(error)}", where=str(path), remedy=remedy) from error
    except ValueError as error:
        raise UsageError(f"is not a valid lock: {error}", where=str(path), remedy=remedy) from error


def pin(workflow: Workflow, lock: Lock) -> Workflow:
    """Pin the workflow's hub references to the locked commits. Raises UsageError, before any download, for a reference
    that is not in the lock."""
    commits = lock.commits()

    def at(reference: str) -> str:
        if reference in commits:
            return commits[reference]
        try:
            unknown = isinstance(parse_reference(reference), HubReference)
        except CheckpointError:  # reported when it is opened
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
    """Plan a workflow with its locked inputs. Raises UsageError with the differences if the inputs do not match."""
    lock = read_lock(workflow.path)
    plan = make_plan(pin(workflow, lock), cache, download=download)
    require_locked(plan, lock)
    return plan


def require_locked(plan: Plan, lock: Lock) -> None:
    """Raises UsageError with the differences if the plan of a pinned workflow does not match its lock."""
    path = lock_path(plan.workflow.path)
    if found := list(differences(lock_of(plan, path.parent), lock.at_commits())):
        raise _refused(plan.workflow.path, found)


def lock_of(plan: Plan, folder: Path) -> Lock:
    """The lock of a plan. folder: of the lock. Raises CheckpointError if a model is not on this machine."""
    inputs: dict[str, LockedInput] = {}
    scripts: dict[str, str] = {}
    packages: dict[str, str] = {}
    pipelines = {}
    for each in plan.every:
        if each.checkpoint is None or len(each.loras) < len(each.pipeline.loras):
            raise CheckpointError(
                "its model or a LoRA is not on this machine",
                where=each.pipeline.name,
                remedy="`sdflow run --locked` downloads it.",
            )
        for one in inputs_of(each):
            add_input(inputs, _spelled(one.reference, folder), LockedInput(commit=one.commit, files=one.files))
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
        lora_files=[lora.sha256 for lora in plan.loras],
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


def _refused(workflow: Path, found: list[str]) -> UsageError:
    more = [f"and {len(found) - MOST_TOLD} more"] if len(found) > MOST_TOLD else []
    return UsageError(
        "\n".join(["does not match the lock:", *(f"  {each}" for each in (*found[:MOST_TOLD], *more))]),
        where=str(lock_path(workflow)),
        remedy=f"Restore the locked inputs, or renew the lock: {_command(workflow)}",
    )


def _spelled(reference: str, folder: Path) -> str:
    parsed: Any = parse_reference(reference)
    if not isinstance(parsed, LocalReference):
        return reference
    return _relative(parsed.path, folder) + (f"#{parsed.architecture}" if parsed.architecture else "")


def _relative(path: Path, folder: Path) -> str:
    """A relative path if possible, so that the project can be moved."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # Windows: two drives
        return path.as_posix()
