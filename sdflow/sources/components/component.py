"""Replace a component of a checkpoint: its VAE, denoiser or a text encoder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdflow.errors import CheckpointError, PassError
from sdflow.families.shared.part import Part
from sdflow.models.ports import GUIDANCE, Port
from sdflow.sources.checkpoint import Access, Checkpoint, SubmodelCheckpoint, pipeline_facts
from sdflow.sources.components.component_source import Found, Source


def with_component(checkpoint: Checkpoint, component: str, reference: str, access: Access) -> Checkpoint:
    """The checkpoint with a component's parts replaced, and the resulting facts.

    Raises CheckpointNotLocal as `open_checkpoint` does, CheckpointError for a component that cannot be replaced, is
    missing or damaged, or whose inputs and outputs differ from the checkpoint's own.
    """
    family = checkpoint.family
    known = (*family.exchangeable, *family.exchangeable_texts)
    if component not in known or family.components[component][0].name not in checkpoint.submodels:
        raise CheckpointError(
            f"{checkpoint.reference} has no component {component!r} that can be replaced",
            where=reference,
            remedy=f"Known: {', '.join(known)}.",
        )
    source = Source(checkpoint, component, reference, access)
    found = source.open()
    _require_equal_ports(checkpoint, source.parts, found, reference)
    if component in family.exchangeable_texts:
        _require_equal_vocabulary(checkpoint, source.parts, found, reference)
    changed = replace(checkpoint, submodels={**checkpoint.submodels, **found.submodels})
    facts = _facts(changed, reference)
    notes = [f"{component}: {reference} instead of the checkpoint's own.", *found.notes]
    part = source.parts[0]
    of_its_class = part.of(found.submodels[part.name].load["config"]).model is part.model
    if of_its_class and facts["scaling_factor"] != checkpoint.facts["scaling_factor"]:
        notes.append(
            f"{component}: its configuration scales latents by {facts['scaling_factor']}, the checkpoint's own by "
            f"{checkpoint.facts['scaling_factor']}. It may be of another family."
        )
    others = checkpoint.provenance.get("components", {})
    return replace(
        changed,
        provenance={**checkpoint.provenance, "components": {**others, component: found.provenance}},
        facts=facts,
        notes=(*checkpoint.notes, *notes),
    )


def require_omittable(checkpoint: Checkpoint, components: Collection[str]) -> None:
    """Raises CheckpointError for a component that checkpoints of this family cannot omit."""
    known = checkpoint.family.omittable
    for component in sorted(components):
        if component not in known:
            raise CheckpointError(
                f"{checkpoint.reference} has no component {component!r} that can be omitted",
                where=f"components.{component}",
                remedy=f"{checkpoint.family.title} can omit only {' or '.join(known)}."
                if known
                else f"{checkpoint.family.title} needs all of its components: remove the entry.",
            )


def _require_equal_ports(checkpoint: Checkpoint, parts: Sequence[Part], found: Found, reference: str) -> None:
    """Raises CheckpointError if a graph's inputs or outputs would differ from the checkpoint's own, which the denoiser
    and the images match."""
    for part in parts:
        own = {port.name: port for port in ports_of(part, checkpoint.submodels[part.name], checkpoint.reference)}
        other = {port.name: port for port in ports_of(part, found.submodels[part.name], reference)}
        for name in {**own, **other}:
            # A denoiser with a guidance input gets the guidance, whatever it replaces.
            if own.get(name) != other.get(name) and (name != GUIDANCE or name in own):
                its, wanted = (f"({axes(ports[name])})" if name in ports else "missing" for ports in (other, own))
                raise CheckpointError(
                    f"{name} of its {part.name} is {its}, but that of {checkpoint.reference} is {wanted}",
                    where=reference,
                    remedy=f"Name a {part.component} for {checkpoint.family.title}.",
                )


def _require_equal_vocabulary(checkpoint: Checkpoint, parts: Sequence[Part], found: Found, reference: str) -> None:
    """Raises CheckpointError for a text encoder that does not match the checkpoint's tokenizer."""
    for part in parts:
        own, other = (
            each[part.name].load["config"].get("vocab_size") for each in (checkpoint.submodels, found.submodels)
        )
        if own != other:
            raise CheckpointError(
                f"its vocabulary has {other} entries, but that of {checkpoint.reference} has {own}",
                where=reference,
                remedy=f"Name a {part.component} for the same tokenizer.",
            )


def ports_of(part: Part, submodel: SubmodelCheckpoint, where: str) -> tuple[Port, ...]:
    """Inputs and outputs of a part's future graph. where: its reference. Raises CheckpointError."""
    try:
        config = submodel.load["config"]
        ports = part.of(config).model.ports(config)
    except KeyError as error:
        raise _lacking(error, where) from error
    except PassError as error:
        raise CheckpointError(error.what, where=where, remedy=error.remedy) from error
    return (*ports.inputs, *ports.outputs)


def axes(port: Port) -> str:
    return ", ".join(map(str, port.axes))


def _facts(checkpoint: Checkpoint, where: str) -> dict[str, Any]:
    configs: dict[str, Mapping[str, Any]] = {
        checkpoint.family.part(name).component: submodel.load["config"]
        for name, submodel in checkpoint.submodels.items()
    }
    scheduler = {"_class_name": checkpoint.facts["scheduler"]}
    try:
        return {**checkpoint.facts, **pipeline_facts(checkpoint.family, {**configs, "scheduler": scheduler})}
    except (KeyError, TypeError, ValueError) as error:
        raise _lacking(error, where) from error


def _lacking(error: Exception, where: str) -> CheckpointError:
    return CheckpointError(
        f"its configuration is incomplete: {error}", where=where, remedy="Save it again with a current diffusers."
    )
