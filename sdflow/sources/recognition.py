"""Which shipped architecture a file in the original layout has: by its shapes, and between equals by what else it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES, FAMILIES, family_of_architecture
from sdflow.families.base import Family
from sdflow.families.few_steps import of_this_name
from sdflow.families.part import Layout
from sdflow.sources.architectures import architecture_config, prediction_of

Shapes = Mapping[str, tuple[int, ...]]
Fingerprint = Mapping[str, tuple[int, ...] | None]
"""Tensor -> its shape; None: there is none."""
Said = tuple[str, str]
"""How the denoiser predicts, as a scheduler's config calls it, and what in the file says so."""

# What else is known by its tensors, so that the refusal can name it: how a name begins -> what it is.
_OTHERS = (
    ("lora_", "a LoRA: name it under `loras`"),
    ("joint_blocks.", "Stable Diffusion 3"),
    ("double_blocks.", "Flux"),
    ("control_model.", "a ControlNet"),
    ("down_blocks.", "a UNet in diffusers' layout: name the folder that holds model_index.json"),
    ("encoder.down_blocks.", "a VAE in diffusers' layout: name the folder that holds model_index.json"),
    ("text_model.encoder.", "a text encoder alone"),
)
# Behind those of the families: an architecture that is none of theirs.
_RELATED = (
    ("conditioner.embedders.", "of the kind of Stable Diffusion XL"),
    ("cond_stage_model.model.", "of the kind of Stable Diffusion 2.x"),
)
# UNets that take more than the latents: channels of the input -> what such a UNet is.
_CHANNELS = {8: "a UNet of InstructPix2Pix", 5: "a depth-to-image UNet"}

# https://github.com/Stability-AI/ModelSpec
_SPECIFIED = "modelspec.prediction_type"
_SPECIFIED_ARCHITECTURE = "modelspec.architecture"
_PREDICTION_OF = {"stable-diffusion-v2-512": "epsilon", "stable-diffusion-v2-768-v": "v_prediction"}
# Tensors without a use but to say how the model predicts, as ComfyUI's supported_models.py reads them.
_MARKS = {"v_pred": "v_prediction", "edm_mean": "edm", "edm_vpred.sigma_max": "edm"}
# Steps of training of 2.0 base and of 2.1, by which diffusers' convert_from_ckpt.py knows them. Others say nothing.
_STEPS = {875000: "epsilon", 110000: "v_prediction"}


def what_it_says(names: Iterable[str], metadata: Mapping[str, str]) -> Said | None:
    """What a file's metadata, or a tensor that is there for that alone, say of how the denoiser predicts."""
    if (written := metadata.get(_SPECIFIED)) is not None:
        prediction = "v_prediction" if written in ("v", "v-prediction") else written
        return prediction, f"its {_SPECIFIED} is {written}"
    if (written := metadata.get(_SPECIFIED_ARCHITECTURE, "")) in _PREDICTION_OF:
        return _PREDICTION_OF[written], f"its {_SPECIFIED_ARCHITECTURE} is {written}"
    names = frozenset(names)
    return next(((_MARKS[mark], f"it has a tensor {mark}") for mark in _MARKS if mark in names), None)


def what_the_step_says(step: int | None) -> Said | None:
    """What the number of steps that a model of 2.x was trained for says. Of no use for other families."""
    return (_STEPS[step], f"its global_step is {step}") if step in _STEPS else None


def choose(path: Path, fitting: Sequence[str], said: Said | None, wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """One of the architectures that a file's shapes fit, and what the user should hear of the choice.

    said: None where the file does not say how it predicts; then the first is taken. wanted: what the user wrote.
    Raises CheckpointError where it is none of them, and where the file says that it predicts in another way.
    """
    predicts = {name: prediction_of(name) for name in fitting}
    if wanted is not None and wanted not in fitting:
        raise CheckpointError(
            f"has the shapes of {' and of '.join(fitting)}, not of {wanted}",
            where=str(path),
            remedy=f"Write {' or '.join(f'{path.name}#{name}' for name in fitting)}.",
        )
    if wanted is not None:
        odd = said is not None and said[0] != predicts[wanted]
        return wanted, (f"{path.name} is taken for {wanted}, although {said[1]}.",) if said and odd else ()
    fitting = of_this_name(fitting, path.name)
    if said is not None:
        prediction, why = said
        agreed = [name for name in fitting if predicts[name] == prediction]
        if not agreed:
            raise CheckpointError(
                f"{why}, and {fitting[0]}, whose shapes it has, predicts {predicts[fitting[0]]}",
                where=str(path),
                remedy="Take it as a diffusers folder, whose scheduler says how it predicts. "
                f"{path.name}#{fitting[0]} takes it as it is.",
            )
        return agreed[0], (f"{path.name} is taken for {agreed[0]}: {why}.",) if len(fitting) > 1 else ()
    if len(fitting) == 1:
        return fitting[0], ()
    first, *others = fitting
    instead = " or ".join(f"{path.name}#{name} ({_size(name)} pixels, {predicts[name]})" for name in others)
    note = (
        f"{path.name} does not say whether it is {' or '.join(fitting)}; it is taken for {first} ({_size(first)} pixels, "
        f"{predicts[first]}). Else write {instead}."
    )
    return first, (note,)


def _size(architecture: str) -> int:
    """Height and width, in pixels, of the images that it was made for."""
    family = family_of_architecture(architecture)
    parts = [part for part in family.parts if not part.optional]
    return family.latents({part.name: architecture_config(architecture, part.component) for part in parts}).image_size


def layouts_of(family: Family, names: Iterable[str]) -> dict[str, Layout]:
    """Part -> how it lies in a file with tensors of these names; the parts that are not in it are left out."""
    names = list(names)
    found: dict[str, Layout] = {}
    for part in family.parts:
        for layout in part.layouts:
            if part.name not in found and any(name.startswith(layout.prefix) for name in names):
                found[part.name] = layout
    return found


def fitting_architectures(path: Path, shapes: Shapes) -> list[str]:
    """The shipped architectures whose tensors have the file's shapes. Raises CheckpointError where there is none, naming
    what the file is, if that is known."""
    shapes = {**shapes, **current_shapes(shapes)}
    prints = {architecture: _fingerprint(architecture) for architecture in ARCHITECTURES}
    fitting = [
        architecture
        for architecture, wanted in prints.items()
        if all(shapes.get(name) == shape for name, shape in wanted.items())
    ]
    if fitting:
        return fitting
    nearest = max(prints, key=lambda name: sum(shapes.get(key) == shape for key, shape in prints[name].items()))
    raise CheckpointError(
        f"not an architecture that sdflow knows: {_description(shapes, nearest, prints[nearest])}",
        where=str(path),
        remedy=f"Supported in one file: {', '.join(family.title for family in FAMILIES.values())}, each with its VAE and "
        "its text encoders. Other checkpoints may work as a diffusers folder.",
    )


def _fingerprint(architecture: str) -> Fingerprint:
    family = family_of_architecture(architecture)
    components = [part.component for part in family.parts if part.layouts]
    return family.fingerprint({name: architecture_config(architecture, name) for name in components})


def current_shapes(shapes: Shapes) -> Shapes:
    """The file's tensors under their names of today: files converted with transformers 5 lack a `text_model.`."""
    found = {}
    for family in FAMILIES.values():
        for part in family.parts:
            for layout in part.layouts:
                for name, shape in shapes.items():
                    if name.startswith(layout.prefix):
                        bare = name.removeprefix(layout.prefix)
                        found[f"{layout.prefix}{part.model.current_name(bare)}"] = shape
    return found


def _description(shapes: Shapes, nearest: str, wanted: Fingerprint) -> str:
    denoiser = next(layout.prefix for family in FAMILIES.values() for layout in family.part(family.denoiser).layouts)
    for begin, what in _OTHERS:
        if any(name.removeprefix(denoiser).startswith(begin) for name in shapes):
            return f"this is {what}"
    related = next((f"; it is {what}" for begin, what in _RELATED if any(key.startswith(begin) for key in shapes)), "")
    family = family_of_architecture(nearest)
    there = layouts_of(family, shapes)
    # Of a part that may lie under several prefixes: the one that the nearest architecture has.
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
        return f"it holds no tensor {name}{related}"
    if expected is None:
        return f"it holds {name}, which {nearest} does not have{related}"
    first = name.endswith("input_blocks.0.0.weight") and len(shapes[name]) > 1
    kind = _CHANNELS.get(shapes[name][1]) if first else None
    named = f" ({kind})" if kind else ""
    return f"{name} is {list(shapes[name])}{named}, in {nearest} it is {list(expected)}{related}"
