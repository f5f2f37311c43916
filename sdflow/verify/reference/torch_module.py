"""A submodel's PyTorch model, with its LoRAs merged by diffusers and PEFT: the reference for an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.families import FAMILIES, part_of
from sdflow.models.ports import Ports
from sdflow.sources import load_module
from sdflow.verify.pretrained import read_by_library, reader
from sdflow.verify.reference.forwards import Network
from sdflow.verify.reference.merged_loras import merge_lora
from sdflow.verify.reference.streamed import StreamedWeights


@dataclass(frozen=True)
class LoraMerge:
    """A LoRA file and its scale. Independent of sdflow's reader of LoRAs, which is under test."""

    path: Path
    scale: float


@dataclass(frozen=True)
class TorchModule:
    """How to load a module. load: from `open_checkpoint`. loras: in the workflow's order. denoiser: its config, needed
    to read names in LoRAs, except for the denoiser itself. half: the 16-bit type for comparison. most: limit in bytes
    for weights in memory, as float32; None: all of them."""

    submodel: str
    load: Mapping[str, Any]
    loras: Sequence[LoraMerge] = ()
    denoiser: Mapping[str, Any] = field(default_factory=dict)
    half: str = "float16"
    most: int | None = None

    def network(self, merged: Callable[[LoraMerge, int], None] = lambda lora, layers: None) -> Network:
        """The module in fp32 with its ports. merged: is called with the number of layers that each LoRA changed."""
        part = part_of(self.load, self.submodel)
        if self.most is None:
            module = load_module(self.submodel, self.load, read_by_library)
            self._merge(module, merged)
            return Network.of(part, self.load["config"], module)
        hollow = {"kind": "hollow", "family": self.load["family"], "config": self.load["config"]}
        module = load_module(self.submodel, hollow)
        merges = self._merge(module, merged, deferred=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        read = reader(self.submodel, part, self.load, shapes)
        return Network.of(part, self.load["config"], module, StreamedWeights(module, read, self.most, merges))

    def _merge(
        self, module: Any, merged: Callable[[LoraMerge, int], None], *, deferred: bool = False
    ) -> dict[str, list[Any]]:
        """Merge the LoRAs. deferred: return PEFT's layers by the name of the weight to merge into instead."""
        family, denoiser = FAMILIES[self.load["family"]], self.denoiser
        if not denoiser:  # another submodel's names: any numbers of blocks separate them
            denoiser = self.load["config"] if self.submodel == family.denoiser else {"layers_per_block": 2}
        later: dict[str, list[Any]] = {}
        if self.submodel in family.with_loras:
            component = family.part(self.submodel).component
            for lora in self.loras:
                layers = merge_lora(
                    module, component, family, denoiser, lora.path, lora.scale, later if deferred else None
                )
                merged(lora, layers)
        return later

    def ports(self) -> Ports:
        """Inputs and outputs of its graph, without loading anything."""
        return part_of(self.load, self.submodel).model.ports(self.load["config"])
