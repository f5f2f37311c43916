"""The content of a lock, and the differences between two, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class LockedInput(_Form):
    """A model, a component or a LoRA."""

    commit: Annotated[Commit | None, Field(description="Commit of the hub's repository.")] = None
    files: Annotated[dict[str, Digest], Field(description="File -> SHA-256 of its content.")] = {}


class LockedChain(_Form):
    """The checkpoint and the steps of a submodel."""

    checkpoint: Annotated[Digest, Field(description="SHA-256 that identifies its weights and configuration.")]
    steps: Annotated[list[str], Field(description="Pass, its version, and SHA-256 of its options with all defaults.")]


class LockedPipeline(_Form):
    """A pipeline of the workflow, or its refiner."""

    target: str
    model: str
    loras: Annotated[list[str], Field(description="Reference and scale.")] = []
    lora_files: Annotated[list[Digest], Field(description="SHA-256 of each LoRA's file, in the same order.")] = []
    submodels: dict[str, LockedChain]


class Lock(_Form):
    """The content of `WORKFLOW.lock`, which `sdflow lock` writes."""

    format_version: Literal[1] = 1
    inputs: Annotated[dict[str, LockedInput], Field(description="By reference; paths are relative to the lock.")]
    scripts: Annotated[dict[str, Digest], Field(description="Scripts of passes and what they import -> SHA-256.")] = {}
    packages: Annotated[dict[str, str], Field(description="Versions that are part of cache keys.")]
    pipelines: dict[str, LockedPipeline]

    def commits(self) -> dict[str, str]:
        """Hub reference -> the same reference at its commit."""
        return {name: _at(name, each.commit) for name, each in self.inputs.items() if each.commit is not None}

    def at_commits(self) -> Lock:
        """The lock with every hub reference at its commit, as in a pinned workflow."""
        commits = self.commits()
        inputs: dict[str, LockedInput] = {}
        for name, each in self.inputs.items():
            add_input(inputs, commits.get(name, name), each)
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


def differences(found: Lock, locked: Lock) -> Iterator[str]:
    """Differences from the lock, in words. Locked entries that were not requested, such as other targets, are none."""
    for name, one in found.inputs.items():
        other = locked.inputs.get(name)
        if other is None:
            yield f"{name} is not in the lock"
            continue
        if one.commit != other.commit:
            yield f"{name} is at commit {one.commit}, but locked at {other.commit}"
        for file, sha256 in one.files.items():
            if file not in other.files:
                yield f"{name}: the file {file} is not in the lock"
            elif other.files[file] != sha256:
                inner = "" if name.endswith(file) else f": {file}"
                yield f"{name}{inner} has changed: SHA-256 {sha256}, locked {other.files[file]}"
    for what, here, there in (("script", found.scripts, locked.scripts), ("package", found.packages, locked.packages)):
        for name, value in here.items():
            if name not in there:
                yield f"the {what} {name} is not in the lock"
            elif there[name] != value:
                yield f"the {what} {name} is {value}, but locked as {there[name]}"
    for name, pipeline in found.pipelines.items():
        if name not in locked.pipelines:
            yield f"the pipeline {name} is not in the lock, only {', '.join(locked.pipelines)}"
        else:
            yield from _of_pipeline(name, pipeline, locked.pipelines[name])


def _of_pipeline(name: str, found: LockedPipeline, locked: LockedPipeline) -> Iterator[str]:
    for key in ("target", "model", "loras", "lora_files"):
        here, there = getattr(found, key), getattr(locked, key)
        if here != there:
            yield f"{name}: {key} {_words(here)}, but locked as {_words(there)}"
    if [*found.submodels] != [*locked.submodels] and {*found.submodels} != {*locked.submodels}:
        yield f"{name}: it builds {', '.join(found.submodels)}, but the lock has {', '.join(locked.submodels)}"
    for submodel in found.submodels.keys() & locked.submodels.keys():
        one, other = found.submodels[submodel], locked.submodels[submodel]
        if one.checkpoint != other.checkpoint:
            yield f"{name}/{submodel}: its weights or its configuration changed"
        for index, (step, before) in enumerate(zip(one.steps, other.steps, strict=False)):
            if step != before:
                same = step.split()[:-1] == before.split()[:-1]
                yield f"{name}/{submodel}/{index}: {step.rpartition(' ')[0]}" + (
                    " has options that differ from the lock" if same else f", but locked as {before.rpartition(' ')[0]}"
                )
        if len(one.steps) != len(other.steps):
            yield f"{name}/{submodel}: {len(one.steps)} steps, but the lock has {len(other.steps)}"


def _words(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " + ".join(value) or "none"


def add_input(inputs: dict[str, LockedInput], name: str, found: LockedInput) -> None:
    """Add an input; a reference may occur several times, with different files each."""
    known = inputs.get(name, found)
    inputs[name] = LockedInput(commit=found.commit, files={**known.files, **found.files})


def _at(reference: str, commit: str) -> str:
    return f"{reference.partition('@')[0]}@{commit}"


def _pinned_lora(lora: str, commits: Mapping[str, str]) -> str:
    reference, _, scale = lora.rpartition(" ")
    return f"{commits.get(reference, reference)} {scale}"
