"""A step of a plan: a pass with its options and its part of the input, and the key that all of it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdflow import sources
from sdflow.artifact import Action
from sdflow.config.workflow import StepSpec
from sdflow.disk.file_stamp import Stamp
from sdflow.families import part_of
from sdflow.passes.base import Pass
from sdflow.passes.user_pass import is_user_pass
from sdflow.sources.checkpoint import config_digest
from sdflow.weights.structure import hollow

ACTION_FORMAT = 2


@dataclass(frozen=True)
class LoraFile:
    """A LoRA on disk: the digest of its content, its scale, how the workflow calls it, and the submodels it changes.

    stamp: of the file, from before it was read. commit: of the hub's repository that it is from.
    """

    reference: str
    path: Path
    sha256: str
    scale: float
    submodels: tuple[str, ...]
    stamp: Stamp
    commit: str | None = None


@dataclass(frozen=True)
class Step:
    """One step of one pipeline. `id` is stable between runs: `explain` compares the step with its last build by it.

    source: the submodel's checkpoint; None while it is not on this machine.
    weights: "carried" with the graph; "symbolic": the graph has recipes in their place; "bound": put in by this step.
    script_stamps: of the user's scripts, from before they were read.
    lacks: distributions that its pass needs and this machine does not have: it cannot run here. `uses` then has the versions
        that its structure was made with elsewhere, or those alone that are known.
    """

    pipeline: str
    submodel: str
    index: int
    spec: StepSpec
    implementation: type[Pass[Any]]
    config: Mapping[str, Any]
    uses: Mapping[str, str]
    user_scripts: tuple[str, ...]
    loras: tuple[LoraFile, ...]
    source: sources.SubmodelCheckpoint | None
    weights: Literal["carried", "symbolic", "bound"] = "carried"
    script_stamps: tuple[Stamp, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def has_key(self) -> bool:
        """Whether all the versions are known that are part of its key."""
        return set(self.uses) >= set(self.implementation.uses)

    @property
    def id(self) -> str:
        return f"{self.pipeline}/{self.submodel}/{self.index}"

    @property
    def folder(self) -> Path:
        """The folder that a pass given by path is looked up from."""
        return self.spec.folder

    @property
    def name(self) -> str:
        return self.spec.pass_name

    @property
    def imported(self) -> tuple[tuple[str, ...], ...]:
        """What the step's process has imported when it starts. A user's script gets a process that is new throughout."""
        return () if is_user_pass(self.name) else self.implementation.imports

    def action(self, before: str | None, salt: str) -> Action:
        """The step's action. before: the tree digest of the step before; None for the first step."""
        assert self.source is not None, "a step whose checkpoint is not here has no key"
        inputs: dict[str, Any] = {"model": before}
        if before is None and self.weights == "symbolic":
            inputs["model"] = {"architecture": config_digest(self.source.load["config"])}
        elif before is None:
            inputs["model"] = self.source.identity
        if self.weights == "bound":
            inputs["checkpoint"] = self.source.identity
        inputs["loras"] = [{"sha256": lora.sha256, "scale": lora.scale} for lora in self.loras]
        return Action(
            {
                "format": ACTION_FORMAT,
                "pass": {"name": self.implementation.name, "version": self.implementation.version},
                "submodel": part_of(self.source.load, self.submodel).kind,
                "config": self.config,
                "inputs": inputs,
                "uses": self.uses,
                "user_scripts": list(self.user_scripts),
                "salt": salt,
                **({"weights": "symbolic"} if self.weights == "symbolic" else {}),
            }
        )

    @property
    def load(self) -> Mapping[str, Any]:
        """How the pass loads the checkpoint (`PassInputs.checkpoint`)."""
        assert self.source is not None, "planned with download=True"
        if self.weights == "bound" or (self.index == 0 and self.weights == "carried"):
            return self.source.load
        return hollow(self.source.load) if self.index == 0 else {}

    @property
    def stamps(self) -> list[Stamp]:
        """Of every file that the pass reads and its key holds the content of, but for what lies in the cache."""
        return [*sources.stamps_of(self.load), *(lora.stamp for lora in self.loras), *self.script_stamps]

    @property
    def family(self) -> str:
        """The name of the submodel's family."""
        assert self.source is not None, "planned with download=True"
        return str(self.source.load["family"])

    def without_loras(self) -> Step:
        """The same step for the checkpoint alone."""
        return replace(self, loras=())
