"""Recognize a weight file by its tensors' names and shapes; all decisions are made here.

`inspect` and `init` describe the result; opening a model or a component rejects others by this name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES, COMPONENT_ARCHITECTURES, DEFAULT, FAMILIES, family_of_architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.part import Layout, Part
from sdflow.families.shared.unet_and_vae import OTHER_UNETS
from sdflow.models.base import Config, Shapes
from sdflow.sources.architectures import architecture_config
from sdflow.sources.embedding import architectures_reading, embedding_shapes
from sdflow.sources.loras.lora_header import is_adapter

Fingerprint = Mapping[str, tuple[int, ...] | None]
"""Tensor -> its shape; None if the tensor must be absent."""

CHECKPOINT, COMPONENT, LORA, EMBEDDING, UNKNOWN = "checkpoint", "component", "LoRA", "embedding", "unknown"
NET_KIND, IP_ADAPTER = "ControlNet", "IP-Adapter"

# Networks outside all families, by prefixes of their tensors.
_OTHERS = (
    ("controlnet_cond_embedding.", NET_KIND),
    ("controlnet_down_blocks.", NET_KIND),
    ("control_model.", NET_KIND),
    ("lllite_", "ControlNet-LLLite"),
    ("ip_adapter.", IP_ADAPTER),
    ("image_proj.", IP_ADAPTER),
    ("adapter.body.", "T2I-Adapter"),
    ("body.0.rdb1.", "upscaler (ESRGAN)"),
)
# Networks like a family's, in sizes that no shipped architecture has; the longest prefix first, as the most specific.
_UNKNOWN_SIZES = sorted(
    (relative for family in FAMILIES.values() for relative in family.relatives), key=lambda row: -len(row[0])
)
# Contents of files that are not whole checkpoints, named in error messages.
_PARTIAL = (
    ("lora_", "a LoRA: name it under `loras`"),
    *((prefix, f"a {kind}") for prefix, kind in _UNKNOWN_SIZES),
    ("down_blocks.", "a UNet in diffusers' layout: name the folder that holds model_index.json"),
    ("encoder.down_blocks.", "a VAE in diffusers' layout: name the folder that holds model_index.json"),
    ("text_model.encoder.", "a text encoder alone"),
)
# After the families': architectures that belong to none.
_RELATED = (
    ("conditioner.embedders.", "of the kind of Stable Diffusion XL"),
    ("cond_stage_model.model.", "of the kind of Stable Diffusion 2.x"),
)


@dataclass(frozen=True)
class Recognized:
    """kind: CHECKPOINT, whole or partial, another kind of this module, or the name of a network outside all families.
    architectures: the shipped ones with these shapes; for an embedding, those whose text encoders read its vectors.
    components: those in the file. half: the half of its only component, if it is not whole. also: further components
    that it matches, each with an architecture: FLUX.1 and Stable Diffusion 3 share a T5."""

    kind: str
    architectures: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    half: str | None = None
    also: tuple[tuple[str, str], ...] = ()

    @property
    def alone(self) -> bool:
        """Whether it is a component with its own architecture, which no published model contains."""
        return self.kind == COMPONENT and bool(self.architectures) and self.architectures[0] in COMPONENT_ARCHITECTURES

    @property
    def title(self) -> str:
        """The kind, in words; for a component, its name."""
        return self.components[0].replace("_", " ") if self.kind == COMPONENT else self.kind


def recognize(path: Path, shapes: Shapes) -> Recognized:
    """Recognize a file with tensors of these shapes. path: PEFT's configuration may be next to it."""
    if is_adapter(path, shapes):
        return Recognized(LORA)
    if (words := embedding_shapes(shapes)) is not None:
        return Recognized(EMBEDDING, architectures_reading([width for _, width in words.values()]))
    shapes = {**shapes, **current_shapes(shapes)}
    if (other := _named(_OTHERS, shapes)) is not None:
        return Recognized(other)
    if (alone := component_alone(shapes)) is not None:
        architecture, half = alone
        return Recognized(COMPONENT, (architecture,), (COMPONENT_ARCHITECTURES[architecture],), half)
    held = {architecture: _components_in(architecture, shapes) for architecture in ARCHITECTURES}
    first = max(held.values(), key=len)  # among equals, the first
    if not first:
        return Recognized(_named(_UNKNOWN_SIZES, shapes) or UNKNOWN)
    if len(first) == 1:
        others = {found[0]: name for name, found in reversed(held.items()) if len(found) == 1 and found != first}
        return Recognized(
            COMPONENT,
            tuple(name for name, found in held.items() if found == first),
            first,
            also=tuple((name, component) for component, name in others.items()),
        )
    return Recognized(CHECKPOINT, tuple(name for name, found in held.items() if len(found) == len(first)), first)


def fitting_architectures(path: Path, shapes: Shapes) -> list[str]:
    """The shipped architectures whose distinguishing tensors a file has. Raises CheckpointError if there are none,
    naming the file's content, if known."""
    there = {**shapes, **current_shapes(shapes)}
    if fitting := [name for name in ARCHITECTURES if _holds(there, _fingerprint(name))]:
        return fitting
    raise CheckpointError(
        f"not a supported architecture: {_what_instead(path, shapes)}",
        where=str(path),
        remedy=f"Supported in one file: {', '.join(family.title for family in FAMILIES.values())}, each with its VAE and "
        "its text encoders. Other checkpoints may work as a diffusers folder.",
    )


def component_alone(shapes: Shapes, component: str | None = None) -> tuple[str, str | None] | None:
    """The shipped single-component architecture of a file, and the half, if it is not whole; None if there is none.
    component: only this one."""
    for architecture, of in COMPONENT_ARCHITECTURES.items():
        if component not in (None, of):
            continue
        part, config = part_alone(architecture)
        if _holds(shapes, part.model.distinguishing_shapes(config)):
            return architecture, None
        if (half := half_of(shapes, part.model.halves(config))) is not None:
            return architecture, half
    return None


def part_alone(architecture: str) -> tuple[Part, Config]:
    """The first part of a component with its own architecture, in its model's variant, and its configuration."""
    component = COMPONENT_ARCHITECTURES[architecture]
    config = architecture_config(architecture, component)
    return FAMILIES[DEFAULT].components[component][0].of(config), config


def half_of(shapes: Shapes, halves: Mapping[str, Shapes]) -> str | None:
    """The half whose file has these tensors; None if there is none. halves: `Model.halves`."""
    return next((half for half, wanted in halves.items() if _holds(shapes, wanted)), None)


def layouts_of(family: Family, names: Iterable[str]) -> dict[str, Layout]:
    """Part -> its layout in a file with tensors of these names; parts outside the file are omitted."""
    names = list(names)
    found: dict[str, Layout] = {}
    for part in family.parts:
        for layout in part.layouts:
            if part.name not in found and any(name.startswith(layout.prefix) for name in names):
                found[part.name] = layout
    return found


def current_shapes(shapes: Shapes) -> Shapes:
    """The file's tensors under their current names: files converted with transformers 5 lack a `text_model.`."""
    found = {}
    for family in FAMILIES.values():
        for part in family.parts:
            for layout in part.layouts:
                for name, shape in shapes.items():
                    if name.startswith(layout.prefix):
                        bare = name.removeprefix(layout.prefix)
                        found[f"{layout.prefix}{part.model.current_name(bare)}"] = shape
    return found


def _fingerprint(architecture: str) -> Fingerprint:
    family = family_of_architecture(architecture)
    components = [part.component for part in family.parts if part.layouts]
    return family.fingerprint({name: architecture_config(architecture, name) for name in components})


def _holds(shapes: Shapes, wanted: Fingerprint) -> bool:
    return any(wanted.values()) and all(shapes.get(name) == shape for name, shape in wanted.items())


def _named(rows: Iterable[tuple[str, str]], names: Iterable[str]) -> str | None:
    """The first row whose prefix one of the names has, with or without the denoiser's prefix."""
    prefix, names = _denoiser_prefix(), list(names)
    return next(
        (what for begin, what in rows if any(name.removeprefix(prefix).startswith(begin) for name in names)), None
    )


def _denoiser_prefix() -> str:
    return next(layout.prefix for family in FAMILIES.values() for layout in family.part(family.denoiser).layouts)


def _components_in(architecture: str, shapes: Shapes) -> tuple[str, ...]:
    """The components of an architecture in a file with the original layout; otherwise the only component it holds."""
    family, prints = family_of_architecture(architecture), _fingerprint(architecture)
    parts = [parts[0] for parts in family.components.values() if parts[0].layouts]
    whole = {part.component for part in parts if any(_holds(shapes, each) for each in _prefixed(prints, part))}
    if whole:
        # A part outside all fingerprints is present if its names are.
        return tuple(part.component for part in parts if part.component in whole or _lies(shapes, prints, part))
    return next(((part.component,) for part in parts if _is_alone(part, architecture, prints, shapes)), ())


def _lies(shapes: Shapes, prints: Fingerprint, part: Part) -> bool:
    """Whether a file has tensors with a prefix of this part, which is outside the fingerprint."""
    prefixes = tuple(layout.prefix for layout in part.layouts)
    return not any(name.startswith(prefixes) for name in prints) and any(name.startswith(prefixes) for name in shapes)


def _is_alone(part: Part, architecture: str, prints: Fingerprint, shapes: Shapes) -> bool:
    """Whether a file holds only this part, with the library's names or the original ones without a prefix."""
    wanted = part.model.distinguishing_shapes(architecture_config(architecture, part.component))
    if _holds({part.model.current_name(name): shape for name, shape in shapes.items()}, wanted):
        return True
    return any(
        _holds(shapes, {name.removeprefix(layout.prefix): shape for name, shape in each.items()})
        for layout, each in zip(part.layouts, _prefixed(prints, part), strict=True)
    )


def _prefixed(prints: Fingerprint, part: Part) -> list[Fingerprint]:
    """The parts of a fingerprint under each of the part's prefixes."""
    return [
        {name: shape for name, shape in prints.items() if name.startswith(layout.prefix)} for layout in part.layouts
    ]


def _likeness(shapes: Shapes, prints: Fingerprint) -> tuple[int, float]:
    """The number of tensors that a file shares with an architecture, then the share of their names: a file of an unknown
    size has hardly any of these shapes. Tensors that both lack say nothing."""
    wanted = {name: shape for name, shape in prints.items() if shape is not None}
    same = sum(shapes.get(name) == shape for name, shape in wanted.items())
    return same, sum(name in shapes for name in wanted) / len(wanted)


def _what_instead(path: Path, shapes: Shapes) -> str:
    """The content of a file that is not a whole checkpoint, or its difference from the nearest architecture, as the end
    of a sentence."""
    found = recognize(path, shapes)
    kind = found.kind
    if kind == LORA:
        return "this is a LoRA or a related adapter: name it under `loras`"
    if kind == COMPONENT and not found.alone:
        families = dict.fromkeys(family_of_architecture(name) for name in found.architectures)
        begins = tuple(
            layout.prefix for each in families for layout in each.part(each.denoiser).layouts if layout.prefix
        )
        denoiser = any(family.part(family.denoiser).component in found.components for family in families)
        if denoiser or not any(name.startswith(begins) for name in shapes):  # else a checkpoint of an unknown denoiser
            titles = " or ".join(dict.fromkeys(family.title for family in families))
            return (
                f"this is the {found.title} alone, of {titles}: name its pipeline's folder or repository as `model`, and "
                "this file under `components`"
            )
    if kind not in (CHECKPOINT, COMPONENT, UNKNOWN):
        return f"this is {'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
    shapes = {**shapes, **current_shapes(shapes)}
    if (partial := _named(_PARTIAL, shapes)) is not None:
        return f"this is {partial}"
    prints = {architecture: _fingerprint(architecture) for architecture in ARCHITECTURES}
    nearest = max(prints, key=lambda name: _likeness(shapes, prints[name]))
    wanted = prints[nearest]
    related = next((f"; it is {what}" for begin, what in _RELATED if any(key.startswith(begin) for key in shapes)), "")
    family = family_of_architecture(nearest)
    there = layouts_of(family, shapes)
    # For a part with several possible prefixes, use the nearest architecture's.
    missing = dict.fromkeys(
        layout.prefix
        for part in family.parts
        for layout in part.layouts
        if part.name not in there and any(name.startswith(layout.prefix) for name in wanted if wanted[name] is not None)
    )
    if missing:
        return f"it holds no tensors under {', '.join(missing)}{related}"
    name, expected = next(each for each in wanted.items() if shapes.get(each[0]) != each[1])
    if name not in shapes:
        return f"tensor {name} is missing{related}"
    if expected is None:
        return f"it holds {name}, which {nearest} does not have{related}"
    first = name.endswith("input_blocks.0.0.weight") and len(shapes[name]) > 1
    other = OTHER_UNETS.get(shapes[name][1]) if first else None
    named = f" ({other})" if other else ""
    return f"{name} is {list(shapes[name])}{named}, in {nearest} it is {list(expected)}{related}"
