"""A step of a plan: a pass with its options and its share of the input, and the key made from them."""

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
    """A LoRA on disk: its content's digest, its scale, its reference in the workflow, and the submodels it changes.

    stamp: of the file, taken before it was read. commit: of its hub repository.
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
    """One step of one pipeline. `id` is stable between runs: `explain` uses it to find the step's last build.

    source: the submodel's checkpoint; None while it is not on this machine.
    weights: "carried" with the graph; "symbolic": the graph has recipes in their place; "bound": added by this step.
    script_stamps: of user scripts, taken before they were read.
    lacks: distributions that its pass needs and this machine lacks, so that it cannot run here. `uses` then has the
        versions that its structure was made with elsewhere, or only the known ones.
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
        """Whether all versions in its key are known."""
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
        """Modules that the step's process may have imported at its start. A user script gets a new process."""
        return () if is_user_pass(self.name) else self.implementation.imports

    def action(self, before: str | None, salt: str) -> Action:
        """The step's action. before: tree digest of the previous step's artifact; None for the first step."""
        assert self.source is not None, "a step whose checkpoint is not here has no key"
        inputs: dict[str, Any] = {"model": before}
        if before is None and self.weights == "symbolic":
            inputs["model"] = {"architecture": config_digest(self.source.load["config"])}
        elif before is None:
            inputs["model"] = self.source.identity
        if self.weights == "bound":
            inputs["checkpoint"] = self.source.identity
        part = part_of(self.source.load, self.submodel)
        if before is None and part.model.traced_as is not None:
            inputs["traced"] = part.model.traced_as
        inputs["loras"] = [{"sha256": lora.sha256, "scale": lora.scale} for lora in self.loras]
        return Action(
            {
                "format": ACTION_FORMAT,
                "pass": {"name": self.implementation.name, "version": self.implementation.version},
                "submodel": part.kind,
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
        """Stamps of every file outside the cache that the pass reads and its key covers."""
        return [*sources.stamps_of(self.load), *(lora.stamp for lora in self.loras), *self.script_stamps]

    @property
    def family(self) -> str:
        """The name of the submodel's family."""
        assert self.source is not None, "planned with download=True"
        return str(self.source.load["family"])

    def without_loras(self) -> Step:
        """The same step for the checkpoint without LoRAs."""
        return replace(self, loras=())
