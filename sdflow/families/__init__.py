"""The model families that sdflow supports: one folder each.

A folder has `family.py` with a `FAMILY`, the denoiser's model if no other family has it, `architectures/` with shipped
configurations, and `workflows/base/` with pass chains. `shared/` has common code. Adding a folder adds a family; tests
add theirs in the namespace package `sdflow_families` (`sdflow.disk.shipped`).
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
"""Family of manifests and loads that name none, written when it was the only one."""


def _families() -> dict[str, Family]:
    """Return the families by name: the default one first, which wins ambiguous lookups, then the others sorted by
    name."""
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
"""Modules of diffusers and transformers that define the models' classes."""


def family_of_index(index: Mapping[str, Any], *, assembled: bool = False) -> Family | None:
    """Return the family of a pipeline with this model_index.json. assembled: also accept sdflow's own folders.

    If two families share the class, the components that the pipeline lacks decide.
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
    """Return the part of a family that `load` (`SubmodelCheckpoint.load`) is for."""
    return FAMILIES[load.get("family", DEFAULT)].part(submodel).of(load["config"])


def family_of_architecture(architecture: str) -> Family:
    """Return the family of a shipped architecture."""
    return next(family for family in FAMILIES.values() if architecture in family.architectures)


ARCHITECTURES: Mapping[str, Architecture] = {
    name: architecture for family in FAMILIES.values() for name, architecture in family.architectures.items()
}
"""Shipped architectures of whole pipelines."""

MARKED_ARCHITECTURES: Mapping[str, str] = {name: each.like for name, each in ARCHITECTURES.items() if each.marked}
"""Architecture that differs from another only in what its denoiser predicts -> that other (`Architecture.marked`)."""

COMPONENT_ARCHITECTURES = COMPONENTS
ADAPTER_ARCHITECTURES = ADAPTERS
