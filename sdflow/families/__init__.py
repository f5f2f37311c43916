"""The families that sdflow knows: one folder each.

A folder holds `family.py` with a `FAMILY`, its denoiser's model where no other family has it, `architectures/` with the
configurations that it ships, and `workflows/base/` with chains of passes. `shared/` is what several have in common. Adding a
folder adds a family; tests bring theirs in the namespace package `sdflow_families` (`sdflow.disk.shipped`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sdflow.disk.shipped import family_modules
from sdflow.families.shared.architecture import ADAPTERS, COMPONENTS, Architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.part import Part

DEFAULT = "stable_diffusion"
"""The family of manifests and loads that name none, which were written when there was only this one."""


def _families() -> dict[str, Family]:
    """By name: the default one, which also wins where a question has several answers, then the others in order of their names."""
    found: list[Family] = [import_module(name).FAMILY for name in family_modules()]
    return {family.name: family for family in sorted(found, key=lambda family: family.name != DEFAULT)}


FAMILIES: Mapping[str, Family] = _families()

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


ARCHITECTURES: Mapping[str, Architecture] = {
    name: architecture for family in FAMILIES.values() for name, architecture in family.architectures.items()
}
"""The architectures of whole pipelines that sdflow ships."""

MARKED_ARCHITECTURES: Mapping[str, str] = {name: each.like for name, each in ARCHITECTURES.items() if each.marked}
"""Architectures that differ from another only in what the denoiser predicts -> that other (`Architecture.marked`)."""

COMPONENT_ARCHITECTURES = COMPONENTS
ADAPTER_ARCHITECTURES = ADAPTERS
