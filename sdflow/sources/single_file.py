"""A checkpoint in one file in the original (CompVis, SGM) layout: UNet, VAE and text encoders, told apart by prefixes.

Such a file holds no configuration. The architecture is the shipped one whose tensors have the file's shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sdflow.errors import CheckpointError
from sdflow.families import ARCHITECTURES, FAMILIES, family_of_architecture
from sdflow.families.base import Family, Layout, Part
from sdflow.sources.architectures import architecture_config, architecture_index, companion_folder
from sdflow.sources.checkpoint import (
    Checkpoint,
    FileDigests,
    SubmodelCheckpoint,
    config_digest,
    file_stamp,
    pipeline_facts,
    read_options,
    side_by_side,
    submodels_of,
)
from sdflow.sources.folder import refuse_pickle
from sdflow.sources.reference import PICKLE_SUFFIXES
from sdflow.sources.safetensors_file import TensorEntry, digest_tensors, read_header

Shapes = Mapping[str, tuple[int, ...]]

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
    ("conditioner.embedders.1.", "of the kind of Stable Diffusion XL"),
    ("conditioner.embedders.0.", "of the kind of Stable Diffusion XL, its refiner"),
    ("cond_stage_model.model.", "of the kind of Stable Diffusion 2.x"),
)


def open_single_file(path: Path, *, reference: str, digests: FileDigests, allow_pickle: bool) -> Checkpoint:
    """The checkpoint in a .safetensors file, or in a pickle when those are allowed.

    A pickle's first opening loads torch to read its shapes; what was found is remembered in `digests`.
    Raises CheckpointError for a damaged file, and for an architecture that is not supported, naming it if it is known.
    """
    pickled = path.suffix in PICKLE_SUFFIXES
    stamp = file_stamp(path)  # before the digests: a file that changes in between is then refused when it is loaded
    if pickled:
        refuse_pickle(path, allow_pickle)
        # A JSON list: the architecture, then every prefix that the file has.
        known = json.loads(digests.value(path, "single-file-architecture-2", _describe_pickle))
        architecture, names = known[0], known[1:]
    elif path.suffix == ".safetensors":
        header = read_header(path)
        architecture = _find(path, {name: entry.shape for name, entry in header.items()})
        names = list(header)
    else:
        raise CheckpointError(
            f"a file of the unknown kind {path.suffix!r}", where=str(path), remedy="Use a .safetensors file."
        )
    family = family_of_architecture(architecture)
    layouts = _layouts(family, names)
    prefix_of = {family.part(name).component: layout.prefix for name, layout in layouts.items()}
    entries = {} if pickled else {component: under(header, prefix) for component, prefix in prefix_of.items()}
    whole, *sums = side_by_side([
        partial(digests.digest, path),
        *(
            partial(digests.value, path, f"tensors-1/{component}", partial(digest_tensors, entries=found))
            for component, found in entries.items()
        ),
    ])  # fmt: skip
    tensors = dict(zip(entries, sums, strict=True))

    def build(part: Part, config: Mapping[str, Any]) -> SubmodelCheckpoint:
        content = {"file": whole} if pickled else {"tensors": tensors[part.component]}
        return part_of_file(part, config, family, content, stamp, prefix_of[part.component])

    configs = {component: architecture_config(architecture, component) for component in prefix_of}
    lacking = ", ".join(part.name.replace("_", " ") for part in family.parts if part.component not in prefix_of)
    notes = [f"{path.name} has the shapes of {architecture}" + (f"; it holds no {lacking}." if lacking else ".")]
    if pickled:
        notes.append(f"{path.name} is pickled; it is loaded with weights_only=True.")
    submodels = submodels_of(family, configs, build)
    return Checkpoint(
        family=family,
        reference=reference,
        provenance={
            "kind": "single_file",
            "path": str(path.absolute()),
            "architecture": architecture,
            "files": {path.name: whole},
        },
        submodels=submodels,
        companions={
            name: companion_folder(architecture, name)
            for name, companion in family.companions.items()
            if companion.part is None or companion.part in submodels
        },
        facts={
            **pipeline_facts(family, {**configs, "scheduler": architecture_config(architecture, "scheduler")}),
            "requires_safety_checker": False,
        },
        options=read_options(family, architecture_index(architecture)),
        notes=tuple(notes),
    )


def part_of_file(
    part: Part,
    config: Mapping[str, Any],
    family: Family,
    content: Mapping[str, str],
    stamp: Mapping[str, Any],
    prefix: str | None,
) -> SubmodelCheckpoint:
    """A part in one file. content: the digest of its tensors (`tensors`), or of the whole pickle (`file`). stamp: of the
    file. prefix: of its names in the original layout; None: they are the module's own."""
    return SubmodelCheckpoint(
        identity={
            "kind": "single_file",
            "class": part.model.class_name,
            "config": config_digest(config),
            **content,
        },
        load={
            "kind": "files",
            "family": family.name,
            "config": config,
            "files": [stamp],
            "pickled": "file" in content,
            "prefix": prefix,
        },
    )


def _layouts(family: Family, names: Iterable[str]) -> dict[str, Layout]:
    """Part -> how it lies in a file with tensors of these names; the parts that are not in it are left out."""
    names = list(names)
    found: dict[str, Layout] = {}
    for part in family.parts:
        for layout in part.layouts:
            if part.name not in found and any(name.startswith(layout.prefix) for name in names):
                found[part.name] = layout
    return found


def under(header: Mapping[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    """The tensors whose names begin with the prefix."""
    return {name: entry for name, entry in header.items() if name.startswith(prefix)}


def pickle_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a pickle's tensors by name. It loads torch."""
    from sdflow.sources.load import load_pickle

    return {name: tuple(tensor.shape) for name, tensor in load_pickle(path, "meta").items()}


def _describe_pickle(path: Path) -> str:
    shapes = pickle_shapes(path)
    architecture = _find(path, shapes)
    return json.dumps(
        [architecture, *(layout.prefix for layout in _layouts(family_of_architecture(architecture), shapes).values())]
    )


def _fingerprint(architecture: str) -> Shapes:
    family = family_of_architecture(architecture)
    components = [part.component for part in family.parts if part.layouts]
    return family.fingerprint({name: architecture_config(architecture, name) for name in components})


def _find(path: Path, shapes: Shapes) -> str:
    shapes = {**shapes, **_current(shapes)}
    prints = {architecture: _fingerprint(architecture) for architecture in ARCHITECTURES}
    for architecture, wanted in prints.items():
        if all(shapes.get(name) == shape for name, shape in wanted.items()):
            return architecture
    nearest = max(prints, key=lambda name: sum(shapes.get(key) == shape for key, shape in prints[name].items()))
    raise CheckpointError(
        f"not an architecture that sdflow knows: {_description(shapes, nearest, prints[nearest])}",
        where=str(path),
        remedy=f"Supported in one file: {', '.join(family.title for family in FAMILIES.values())}, each with its VAE and "
        "its text encoders. Other checkpoints may work as a diffusers folder.",
    )


def _current(shapes: Shapes) -> Shapes:
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


def _description(shapes: Shapes, nearest: str, wanted: Shapes) -> str:
    denoiser = next(layout.prefix for family in FAMILIES.values() for layout in family.part(family.denoiser).layouts)
    for begin, what in _OTHERS:
        if any(name.removeprefix(denoiser).startswith(begin) for name in shapes):
            return f"this is {what}"
    family = family_of_architecture(nearest)
    prefixes = dict.fromkeys(layout.prefix for part in family.parts for layout in part.layouts[:1])
    there = _layouts(family, shapes)
    missing = [prefix for prefix in prefixes if prefix not in {layout.prefix for layout in there.values()}]
    if missing and len(there) < sum(bool(part.layouts) for part in family.parts):
        return f"it holds no tensors under {', '.join(missing)}"
    name = next(name for name, shape in wanted.items() if shapes.get(name) != shape)
    related = next((f"; it is {what}" for begin, what in _RELATED if any(key.startswith(begin) for key in shapes)), "")
    if name not in shapes:
        return f"it holds no tensor {name}{related}"
    inpainting = (
        " (an inpainting UNet)" if name.endswith("input_blocks.0.0.weight") and shapes[name][1:2] == (9,) else ""
    )
    return f"{name} is {list(shapes[name])}{inpainting}, in {nearest} it is {list(wanted[name])}{related}"
