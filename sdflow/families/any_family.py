"""What a workflow may name before its model is opened and its family known: the union over all families.

With a checkpoint, manifest or pipeline folder, use its own family (`Family`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from sdflow.families import FAMILIES


@cache
def submodels() -> Mapping[str, str]:
    """Return every submodel name -> its description."""
    return {
        part.name: part.about
        for family in FAMILIES.values()
        for part in (*family.parts, *(part for part in (family.net, family.prompter) if part is not None))
    }


@cache
def submodels_with_loras() -> tuple[str, ...]:
    """Return the submodels that LoRAs can change in some family."""
    return tuple(name for name in submodels() if any(name in family.with_loras for family in FAMILIES.values()))


@cache
def optional_submodels() -> tuple[str, ...]:
    """Return the submodels that a checkpoint of some family may lack."""
    return tuple(part.name for family in FAMILIES.values() for part in family.parts if part.optional)


@cache
def net_chains() -> frozenset[str]:
    """Return the submodels whose chain applies to all ControlNets of a pipeline (`Family.net`)."""
    return frozenset(family.net.name for family in FAMILIES.values() if family.net is not None)


@cache
def prompter_chains() -> frozenset[str]:
    """Return the submodels that encode image prompts, which only exist with IP-Adapters (`Family.prompter`)."""
    return frozenset(family.prompter.name for family in FAMILIES.values() if family.prompter is not None)


@cache
def exchangeable_components() -> Mapping[str, str]:
    """Return the components that a workflow may replace (`Family.exchangeable`, `exchangeable_texts`) ->
    description."""
    decoders = (family.part(family.decoder).component for family in FAMILIES.values())
    found = dict.fromkeys(decoders, "The autoencoder, both halves: latents to pixels, and pixels to latents.")
    about = "The denoiser, run once per step. Text encoders, VAE and scheduler stay the model's own."
    texts = dict.fromkeys(name for family in FAMILIES.values() for name in family.exchangeable_texts)
    about_texts = "A text encoder of the same vocabulary. Its tokenizer stays the model's own."
    return {**found, **dict.fromkeys(denoiser_components(), about), **dict.fromkeys(texts, about_texts)}


@cache
def omittable_components() -> Mapping[str, str]:
    """Return the components that a workflow may omit (`Family.omittable`) -> description."""
    return {
        part.component: f"{part.about} null leaves it out."
        for family in FAMILIES.values()
        for part in family.parts
        if part.component in family.omittable
    }


@cache
def denoiser_components() -> tuple[str, ...]:
    """Return the denoisers' components; a base and its refiner never share theirs."""
    return tuple(dict.fromkeys(family.part(family.denoiser).component for family in FAMILIES.values()))
