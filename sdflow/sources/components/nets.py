"""Add ControlNets to a checkpoint: each is a submodel whose outputs the checkpoint's denoiser takes.

Sources are those of components (`sdflow.sources.components.component_source`). A file, in the original layout or with
diffusers' names, has no configuration: it follows from the denoiser's. A pipeline folder holds them as diffusers saves
them: `controlnet`, and with several also `controlnet_1`, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import family_of_architecture, family_of_index
from sdflow.families.shared.part import Part
from sdflow.models.base import Shapes
from sdflow.models.ports import Role
from sdflow.models.residuals import is_residual
from sdflow.sources.architectures import architecture_config
from sdflow.sources.checkpoint import Access, Checkpoint, SubmodelCheckpoint, config_digest
from sdflow.sources.components.component import axes, ports_of
from sdflow.sources.components.component_source import Found, Source
from sdflow.sources.reference import SyntheticReference
from sdflow.sources.weight_files import read_config

_SEVERAL = "Multi"
"""Prefix of the class for several ControlNets, in model_index.json."""


def with_nets(checkpoint: Checkpoint, nets: Mapping[str, str], access: Access) -> Checkpoint:
    """The checkpoint with these ControlNets, by name, and a denoiser that takes their outputs.

    Raises CheckpointNotLocal as `open_checkpoint` does, CheckpointError for one that is missing, damaged, or made for
    another kind of checkpoint.
    """
    family = checkpoint.family
    if family.net is None:
        raise CheckpointError(
            f"sdflow supports no ControlNets for {family.title}",
            where=checkpoint.reference,
            remedy="Remove `controlnets` from the workflow.",
        )
    controlled = replace(
        checkpoint,
        submodels={name: _controlled(family.part(name), submodel) for name, submodel in checkpoint.submodels.items()},
    )
    added: dict[str, SubmodelCheckpoint] = {}
    notes: list[str] = []
    for name, reference in nets.items():
        part = family.part(family.net_name(name))
        source = _Net(checkpoint, family.net.name, reference, access, part)
        found = source.open()
        added |= found.submodels
        _require_fitting(controlled, part, found.submodels[part.name], reference)
        notes += [f"ControlNet {name}: {reference}.", *found.notes]
        others = controlled.provenance.get("controlnets", {})
        provenance = {**controlled.provenance, "controlnets": {**others, name: found.provenance}}
        controlled = replace(controlled, provenance=provenance)
    return replace(controlled, submodels={**controlled.submodels, **added}, notes=(*checkpoint.notes, *notes))


def _controlled(part: Part, submodel: SubmodelCheckpoint) -> SubmodelCheckpoint:
    """The submodel's variant for pipelines with ControlNets."""
    if not part.controlled:
        return submodel
    config = {**submodel.load["config"], **part.controlled}
    return SubmodelCheckpoint(
        identity={**submodel.identity, "config": config_digest(config)}, load={**submodel.load, "config": config}
    )


@dataclass(frozen=True)
class _Net(Source):
    """The source of a ControlNet. component: its folder's name in a pipeline."""

    part: Part

    @property
    def parts(self) -> Sequence[Part]:
        return (self.part,)

    def own_config(self, part: Part) -> dict[str, Any]:
        return self._config(self.checkpoint.submodels[self.checkpoint.family.denoiser].load["config"])

    def _config(self, denoiser: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self.part.model.config_for(denoiser))

    def synthetic(self, parsed: SyntheticReference) -> Found:
        family = family_of_architecture(parsed.architecture)
        denoiser = architecture_config(parsed.architecture, family.part(family.denoiser).component)
        config = self._config(denoiser)
        provenance = {"kind": "synthetic", "architecture": parsed.architecture, "seed": parsed.seed}
        return Found({self.part.name: self.synthetic_part(self.part, config, parsed.seed)}, provenance)

    def prefix(self, names: Iterable[str]) -> str | None:
        names = list(names)
        if any(name in self.part.model.distinguishing_shapes(self.own_config(self.part)) for name in names):
            return None
        begins = self.part.layouts[0].prefix
        return begins if any(name.startswith(begins) for name in names) else ""

    def require_shapes(self, path: Path, shapes: Shapes, prefix: str | None) -> None:
        model, config = self.part.model, self.own_config(self.part)
        for key, wanted in model.distinguishing_shapes(config).items():
            stored = key if prefix is None else f"{prefix}{model.original_names([key])[key].name}"
            if stored not in shapes:
                raise CheckpointError(
                    f"tensor {stored} is missing: this is not a supported ControlNet",
                    where=str(path),
                    remedy="Name a ControlNet with its original names or diffusers'. Control-LoRA, ControlNet-LLLite and "
                    "T2I-Adapter are not supported.",
                )
            if shapes[stored] != wanted:
                raise CheckpointError(
                    f"{stored} is {list(shapes[stored])}, but {self.checkpoint.reference} needs {list(wanted)}",
                    where=str(path),
                    remedy=f"Name a ControlNet for {self.checkpoint.family.title}, of the same generation.",
                )


def _require_fitting(checkpoint: Checkpoint, part: Part, net: SubmodelCheckpoint, reference: str) -> None:
    """Raises CheckpointError if a ControlNet's inputs differ from the denoiser's, or its outputs from what the denoiser
    takes."""
    family, facts = checkpoint.family, checkpoint.facts
    denoiser = checkpoint.submodels[family.denoiser].load["config"]
    taken = {port.name: port for port in family.part(family.denoiser).model.ports(denoiser).inputs}
    given = {port.name: port for port in ports_of(part, net, reference)}
    latents = next(port for port in given.values() if port.role is Role.LATENTS)
    del given[latents.name]
    wrong = [
        f"{name} is ({axes(given[name])}), but {checkpoint.reference} takes ({axes(taken[name])})"
        for name in given
        if name in taken and given[name] != taken[name]
    ]
    residuals = [{name for name in ports if is_residual(name)} for ports in (given, taken)]
    if residuals[0] != residuals[1]:
        wrong.append(f"it outputs {len(residuals[0])} tensors, but {checkpoint.reference} takes {len(residuals[1])}")
    if latents.axes[1] != facts["latent_channels"]:  # inpainting denoisers take more, which are not a ControlNet's
        wrong.append(f"it takes latents of {latents.axes[1]} channels, not {facts['latent_channels']}")
    if (scale := part.model.scale(net.load["config"])) != facts["vae_scale_factor"]:
        wrong.append(f"it downscales its image by {scale}, but the VAE by {facts['vae_scale_factor']}")
    if wrong:
        remedy = f"Name a ControlNet for {family.title}, of the same generation."
        raise CheckpointError(wrong[0], where=reference, remedy=remedy)


def has_nets(index: Mapping[str, Any]) -> bool:
    """Whether a pipeline with this model_index.json has ControlNets."""
    family = family_of_index(index)
    named = None if family is None or family.net is None else index.get(family.net.component)
    return isinstance(named, list) and bool(named) and isinstance(named[-1], str)


def nets_in_folder(model: str) -> dict[str, str]:
    """Name -> folder of each; empty for a model without any, or that is not a local folder.

    Opening reports a damaged folder.
    """
    folder = Path(model).expanduser()
    if not (folder / "model_index.json").is_file():
        return {}
    try:
        index = read_config(folder / "model_index.json")
    except CheckpointError:
        return {}
    family = family_of_index(index)
    if family is None or family.net is None or not has_nets(index):
        return {}
    own = family.net.component
    names = [own]
    while index[own][-1].startswith(_SEVERAL) and (folder / f"{own}_{len(names)}").is_dir():
        names.append(f"{own}_{len(names)}")
    return {name: str(folder / name) for name in names}
