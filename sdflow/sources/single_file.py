"""Open a checkpoint in one file in the original (CompVis, SGM) layout: UNet, VAE and text encoders, separated by
prefixes.

Such a file has no configuration: the shipped architecture with the file's shapes is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sdflow.disk.file_stamp import Stamp, file_stamp
from sdflow.errors import CheckpointError
from sdflow.families import family_of_architecture
from sdflow.families.shared.base import Family
from sdflow.families.shared.part import Part
from sdflow.families.shared.predictions import Said, what_it_says, what_the_step_says
from sdflow.sources.architectures import architecture_config, architecture_index, companion_folders
from sdflow.sources.checkpoint import (
    Access,
    Checkpoint,
    SubmodelCheckpoint,
    config_digest,
    pipeline_facts,
    read_options,
    side_by_side,
    submodels_of,
)
from sdflow.sources.equal_shapes import choose
from sdflow.sources.formats import WeightsFile, open_weights
from sdflow.sources.recognition import fitting_architectures, layouts_of
from sdflow.sources.reference import FILE_SUFFIXES, PICKLE_SUFFIXES
from sdflow.sources.safetensors_file import TensorEntry, read_numbers
from sdflow.sources.weight_files import refuse_pickle


class _Description(NamedTuple):
    """What a file's tensors reveal about its model.

    fitting: the architectures with the file's shapes. said: its hints about its prediction. names: of its tensors;
    for a pickle, only their prefixes.
    """

    fitting: list[str]
    said: Sequence[Said]
    names: list[str]


def open_single_file(
    path: Path,
    reference: str,
    access: Access,
    *,
    architecture: str | None = None,
    left_out: Collection[str] = (),
    origin: Mapping[str, Any] | None = None,
    spelled: Callable[[str], str] | None = None,
) -> Checkpoint:
    """Open the checkpoint in a weight file, or in a pickle if permitted.

    architecture: the user's choice among those that match the file's shapes. left_out: optional components to skip.
    origin: JSON for the provenance of a file on the hub. spelled: how a workflow spells the file with an architecture;
    None: `FILE#NAME`.
    The first opening of a pickle loads torch to read its shapes, which are then cached.
    Raises CheckpointError for a damaged file, and for an unsupported architecture, naming it if known.
    """
    pickled = path.suffix.lower() in PICKLE_SUFFIXES
    stamp = file_stamp(path)  # before the digests, so that a change in between is found on loading
    opened: WeightsFile | None = None
    if pickled:
        refuse_pickle(path, access.allow_pickle)
        known = _Description(*json.loads(access.digests.value(path, "single-file-architecture-5", _describe_pickle)))
    elif path.suffix.lower() in FILE_SUFFIXES:
        opened = open_weights(path)
        opened.require_read()
        known = _describe(opened)
    else:
        raise CheckpointError(
            f"the file type {path.suffix!r} is unknown",
            where=str(path),
            remedy=f"Supported are {', '.join(FILE_SUFFIXES)}.",
        )
    architecture, chosen = choose(path, known.fitting, known.said, architecture, spelled)
    family = family_of_architecture(architecture)
    layouts = layouts_of(family, known.names)
    unread = {part for companion in family.companions.values() if not companion.shipped for part in companion.parts}
    asked = {part.name for part in family.parts if part.component in family.omittable and part.component in left_out}
    layouts = {name: layout for name, layout in layouts.items() if name not in unread | asked}
    prefix_of = {family.part(name).component: layout.prefix for name, layout in layouts.items()}
    hashed = {} if opened is None else prefix_of
    whole, *sums = side_by_side([
        partial(access.digests.digest, path),
        *(digest_work(opened, component, prefix, access) for component, prefix in hashed.items() if opened),
    ])  # fmt: skip
    tensors = dict(zip(hashed, sums, strict=True))

    def build(part: Part, config: Mapping[str, Any]) -> SubmodelCheckpoint:
        content = {"file": whole} if pickled else {"tensors": tensors[part.component]}
        return part_of_file(part, config, family, content, stamp, prefix_of[part.component])

    configs = {component: architecture_config(architecture, component) for component in prefix_of}
    index = architecture_index(architecture)
    lacking = ", ".join(
        part.name.replace("_", " ")
        for part in family.parts
        if part.component not in prefix_of and part.name not in unread
    )
    notes = [f"{path.name} has the shapes of {architecture}" + (f"; it holds no {lacking}." if lacking else ".")]
    notes += chosen
    if untold := sorted((unread - asked) & layouts_of(family, known.names).keys()):
        notes.append(
            f"{path.name} holds {', '.join(untold)} without a tokenizer, and sdflow ships none: it is left out. "
            "A diffusers folder has both."
        )
    if opened is not None:
        notes += opened.notes
    if pickled:
        notes.append(f"{path.name} is pickled; it is loaded with weights_only=True.")
    submodels = submodels_of(family, configs, read_options(family, index), build)
    return Checkpoint(
        family=family,
        reference=reference,
        provenance={
            **(origin or {"kind": "single_file", "path": str(path.absolute())}),
            "architecture": architecture,
            "files": {path.name: whole},
            **({} if opened is None else opened.provenance()),
        },
        submodels=submodels,
        companions=companion_folders(architecture, family.companions, submodels),
        facts={
            **pipeline_facts(family, {**configs, "scheduler": architecture_config(architecture, "scheduler")}),
            "requires_safety_checker": False,
        },
        index=index,
        options=read_options(family, index),
        notes=tuple(notes),
    )


def part_of_file(
    part: Part,
    config: Mapping[str, Any],
    family: Family,
    content: Mapping[str, str],
    stamp: Stamp,
    prefix: str | None,
) -> SubmodelCheckpoint:
    """A part in one file. content: the digest of its tensors (`tensors`), or of the whole pickle (`file`). stamp: of
    the file.
    prefix: of its names in the original layout; None for the module's own names."""
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


def digest_work(opened: WeightsFile, component: str, prefix: str, access: Access) -> Callable[[], str]:
    """A function that returns the cached digest of the component's tensors, which have the prefix."""
    name = opened.digest_name(component)
    return partial(access.digests.value, opened.path, name, lambda path: opened.digest(prefix))


def under(header: Mapping[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    """The tensors with the prefix."""
    return {name: entry for name, entry in header.items() if name.startswith(prefix)}


def _describe(opened: WeightsFile) -> _Description:
    path, shapes = opened.path, opened.shapes
    fitting = fitting_architectures(path, shapes)
    said = what_it_says(shapes, opened.metadata)
    if not said and len(fitting) > 1 and path.suffix.lower() != ".gguf" and prod(shapes.get("global_step", (0,))) == 1:
        said += what_the_step_says(int(read_numbers(path, ["global_step"])["global_step"]))
    return _Description(fitting, said, list(shapes))


def _describe_pickle(path: Path) -> str:
    """A _Description as JSON."""
    from sdflow.sources.load import pickled_shapes

    shapes, step = pickled_shapes(path)
    fitting = fitting_architectures(path, shapes)
    said = what_it_says(shapes, {})
    if not said and len(fitting) > 1:
        said += what_the_step_says(step)
    prefixes = [layout.prefix for layout in layouts_of(family_of_architecture(fitting[0]), shapes).values()]
    return json.dumps([fitting, said, prefixes])
