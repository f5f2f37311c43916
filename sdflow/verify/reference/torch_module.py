"""A submodel's PyTorch model, with its LoRAs merged by diffusers and PEFT: what an artifact is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.families import FAMILIES, part_of
from sdflow.models.base import Ports
from sdflow.sources import load_module
from sdflow.verify.pretrained import read_by_library
from sdflow.verify.reference.forwards import Network
from sdflow.verify.reference.merged_loras import merge_lora


@dataclass(frozen=True)
class LoraMerge:
    """A LoRA file and the scale that it is merged at. Nothing here shares the reader of LoRAs that is judged."""

    path: Path
    scale: float


@dataclass(frozen=True)
class TorchModule:
    """How to load it. load: as `open_checkpoint` gives it. loras: in the order of the workflow. denoiser: its config, which
    names in LoRAs are read by; not needed for the denoiser itself."""

    submodel: str
    load: Mapping[str, Any]
    loras: Sequence[LoraMerge] = ()
    denoiser: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        loras = [{"path": str(lora.path), "scale": lora.scale} for lora in self.loras]
        return {**vars(self), "load": dict(self.load), "loras": loras, "denoiser": dict(self.denoiser)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TorchModule:
        return cls(**{**value, "loras": [LoraMerge(Path(lora["path"]), lora["scale"]) for lora in value["loras"]]})

    def module(self, merged: Callable[[LoraMerge, int], None] = lambda lora, layers: None) -> Any:
        """The module in fp32. merged: is told how many layers of each LoRA."""
        module = load_module(self.submodel, self.load, read_by_library)
        family, denoiser = FAMILIES[self.load["family"]], self.denoiser
        if not denoiser:  # its names are then another's business, and any numbers of blocks keep them apart
            denoiser = self.load["config"] if self.submodel == family.denoiser else {"layers_per_block": 2}
        if self.submodel in family.with_loras:
            component = family.part(self.submodel).component
            for lora in self.loras:
                merged(lora, merge_lora(module, component, family, denoiser, lora.path, lora.scale))
        return module

    def network(self) -> Network:
        """The module with its ports."""
        return Network.of(part_of(self.load, self.submodel), self.load["config"], self.module())

    def ports(self) -> Ports:
        """Inputs and outputs of its graph; nothing is loaded."""
        return part_of(self.load, self.submodel).model.ports(self.load["config"])
