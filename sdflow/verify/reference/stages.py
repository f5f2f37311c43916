"""The modules of a reference, and diffusers' pipelines made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sdflow.families import FAMILIES
from sdflow.families.shared.base import Family
from sdflow.families.shared.latents import Latents
from sdflow.families.shared.torch_start import torch_start
from sdflow.runtime.denoiser.schedule import named_scheduler
from sdflow.runtime.files.folder import SCHEDULER
from sdflow.samples.canvas import canvas
from sdflow.sources.load import load_companion
from sdflow.verify.reference.forwards import Network
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.torch_module import LoraMerge, TorchModule

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]


class Stages:
    """Loads the modules and pipelines of a reference. merged: number of layers that each LoRA changed."""

    def __init__(self, request: ReferenceRequest, progress: Progress) -> None:
        self.request, self.selection, self.progress = request, request.selection, progress
        self.family: Family = FAMILIES[request.family]
        self.configs: dict[str, Any] = {name: load["config"] for name, load in request.loads.items()}
        self.nets = list(self.family.nets(request.loads).values())  # the ControlNets, in order
        self.guided: bool = self.family.guided(self.configs, self.selection.guidance_scale)
        self.merged: dict[str, int] = {}
        self.companions = {
            name: load_companion(self.family.companions[name], folder, str(folder))
            for name, folder in request.companions.items()
        }
        if request.scheduler is not None:
            own = self.companions[SCHEDULER]
            self.companions[SCHEDULER] = named_scheduler(request.scheduler, own.config, self.family.noising)

    @cached_property
    def latents(self) -> Latents:
        return self.family.latents(self.configs)

    def stage(self, submodels: Sequence[str]) -> tuple[dict[str, Network], Any]:
        """These submodels, and diffusers' pipeline of only them."""
        networks = {}
        for submodel in submodels:
            self.progress(f"reference: loading {submodel}")
            networks[submodel] = self.network(submodel, self._note_merged)
        return networks, self.pipeline(networks)

    def network(self, submodel: str, merged: Callable[[LoraMerge, int], None] = lambda lora, layers: None) -> Network:
        """A module in float32. merged: is called with the number of layers that each LoRA changed."""
        request, denoiser = self.request, self.configs[self.family.denoiser]
        most = request.most.get(submodel)
        return TorchModule(submodel, request.loads[submodel], request.loras, denoiser, most=most).network(merged)

    def rounded(self, submodel: str) -> Network:
        """Another instance of the module, in 16 bits."""
        network = self.network(submodel)
        network.to_half(self.request.half_of(submodel))
        return network

    def pipeline(self, networks: Mapping[str, Network], *, own_scheduler: bool = False) -> Any:
        """diffusers' own pipeline of only these submodels. own_scheduler: needed by pipelines that run concurrently."""
        modules = {self.family.part(name).component: network.module for name, network in networks.items()}
        companions = dict(self.companions)
        if own_scheduler:
            companions[SCHEDULER] = copy.deepcopy(companions[SCHEDULER])
        pipeline = self.family.torch_pipeline(modules, companions, self.request.options)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _note_merged(self, lora: LoraMerge, layers: int) -> None:
        self.merged[lora.path.name] = self.merged.get(lora.path.name, 0) + layers

    def start(self, pipeline: Any, noise: torch.Tensor) -> dict[str, Any]:
        """Arguments of diffusers' pipeline other than the prompt."""
        selection, scale = self.selection, self.latents.scale
        given = canvas(self.family.task(self.configs), selection.rows * scale, selection.columns * scale)
        return torch_start(pipeline, noise, selection.steps, pack=self.family.packed, scale=scale, **given)
