"""The families that sdflow knows. A new one is a file beside this one, and a row here; tests bring theirs from elsewhere
(`sdflow.disk.shipped.FAMILIES_ELSEWHERE`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from sdflow.disk.shipped import FAMILIES_ELSEWHERE, family_folders
from sdflow.families.base import Family
from sdflow.families.latent_consistency import LatentConsistency
from sdflow.families.part import Part
from sdflow.families.stable_diffusion import StableDiffusion
from sdflow.families.stable_diffusion_3 import StableDiffusion3
from sdflow.families.stable_diffusion_xl import StableDiffusionXL
from sdflow.families.stable_diffusion_xl_refiner import StableDiffusionXLRefiner


def _elsewhere() -> Iterator[Family]:
    for folder in family_folders():
        yield import_module(f"{FAMILIES_ELSEWHERE}.{folder.name}.family").FAMILY


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        StableDiffusion(),
        StableDiffusionXL(),
        LatentConsistency(),
        StableDiffusionXLRefiner(),
        StableDiffusion3(),
        *_elsewhere(),
    )
}

DEFAULT = "stable_diffusion"
"""The family of manifests and loads that name none: there was only this one."""

NET: str = next(family.net.name for family in FAMILIES.values() if family.net is not None)
"""What the chain of all ControlNets is called; `NET_name` is one of them."""

PROMPTER: str = next(family.prompter.name for family in FAMILIES.values() if family.prompter is not None)
"""What the chain of what reads image prompts is called; it is there beside IP-Adapters alone."""

SUBMODELS: Mapping[str, str] = {
    part.name: part.about
    for family in FAMILIES.values()
    for part in (*family.parts, *(part for part in (family.net, family.prompter) if part is not None))
}
"""Every submodel that a workflow may name, with what it is."""

WITH_LORAS: tuple[str, ...] = tuple(
    name for name in SUBMODELS if any(name in family.with_loras for family in FAMILIES.values())
)
"""Every submodel that LoRAs may change."""

OPTIONAL: tuple[str, ...] = tuple(part.name for family in FAMILIES.values() for part in family.parts if part.optional)
"""The submodels that a checkpoint may lack."""

EXCHANGEABLE: Mapping[str, str] = {
    "vae": "The autoencoder, both halves: latents to pixels, and pixels to latents.",
    **{
        family.part(
            family.denoiser
        ).component: "The denoiser, run once per step. Text encoders, VAE and scheduler stay the model's own."
        for family in FAMILIES.values()
    },
}
"""The components that a workflow of some family may take from elsewhere, with what they are. Which of them a model has, its
family says (`Family.exchangeable`)."""

OMITTABLE: Mapping[str, str] = {
    part.component: f"{part.about} null leaves it out."
    for family in FAMILIES.values()
    for part in family.parts
    if part.component in family.omittable
}
"""The components that a workflow of some family may leave out, with what they are (`Family.omittable`)."""

DENOISERS: frozenset[str] = frozenset(family.part(family.denoiser).component for family in FAMILIES.values())
"""The components that a base and its refiner never share."""

LIBRARY_MODULES: tuple[str, ...] = tuple(
    dict.fromkeys(
        model.library_module
        for family in FAMILIES.values()
        for part in family.parts
        for model in (part.model, *part.instead)
        if model.library_module
    )
)
"""The modules of diffusers and transformers that hold the models' classes."""


def family_of_index(index: Mapping[str, Any], *, assembled: bool = False) -> Family | None:
    """The family of a pipeline with this model_index.json. assembled: it may be one of sdflow's own folders.

    Where two have the same class, what the pipeline lacks decides.
    """
    name = index.get("_class_name")
    reading = [
        family
        for family in FAMILIES.values()
        if name in family.classes or (assembled and name in family.assembled_as.values())
    ]
    there = {component for component, value in index.items() if isinstance(value, list) and value and value[0]}
    reading.sort(key=lambda family: bool(family.lacks), reverse=True)
    return next((family for family in reading if there.isdisjoint(family.lacks)), None)


def part_of(load: Mapping[str, Any], submodel: str) -> Part:
    """The part of a family that `load` (`SubmodelCheckpoint.load`) is for."""
    return FAMILIES[load.get("family", DEFAULT)].part(submodel).of(load["config"])


def family_of_architecture(architecture: str) -> Family:
    """The family of a shipped architecture."""
    return next(family for family in FAMILIES.values() if architecture in family.architectures)


ARCHITECTURES: tuple[str, ...] = tuple(name for family in FAMILIES.values() for name in family.architectures)
"""The architectures that sdflow ships configurations of."""

MARKED_ARCHITECTURES: Mapping[str, str] = {
    "sdxl-v": "sdxl",
    "sdxl-v-tiny": "sdxl-tiny",
    "sdxl-v-zsnr": "sdxl",
    "sdxl-v-zsnr-tiny": "sdxl-tiny",
}
"""Architectures that differ from another in what the denoiser predicts alone -> that other. A file is of one of them only where
it says so, or its user does."""

COMPONENT_ARCHITECTURES: Mapping[str, str] = {"taesd": "vae", "taesd-tiny": "vae"}
"""Architectures of a component alone, for `components` of a workflow -> the component."""

ADAPTER_ARCHITECTURES: tuple[str, ...] = (
    *("ip-adapter", "ip-adapter-plus", "ip-adapter-sdxl", "ip-adapter-plus-sdxl"),
    *("ip-adapter-tiny", "ip-adapter-plus-tiny"),
)
"""Architectures of an IP-Adapter with its image encoder, for `ip_adapters` of a workflow."""
