"""A checkpoint in one file in the original (CompVis, SGM) layout: UNet, VAE and text encoders, told apart by prefixes.

Such a file holds no configuration. The architecture is the shipped one whose tensors have the file's shapes.
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
    """fitting: the architectures that the file has the shapes of. said: what it says of how it predicts. names: of its
    tensors; of a pickle, their prefixes alone."""

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
    """The checkpoint in a file of weights, or in a pickle when those are allowed.

    architecture: which of those that the file's shapes fit, where the user says so. left_out: components that are not read, of
    those that it may lack. origin: JSON for the provenance, of a file of the hub. spelled: how a workflow names the file as
    one of an architecture; None: `FILE#NAME`.
    A pickle's first opening loads torch to read its shapes; what was found is remembered in its digests.
    Raises CheckpointError for a damaged file, and for an architecture that is not supported, naming it if it is known.
    """
    pickled = path.suffix.lower() in PICKLE_SUFFIXES
    stamp = file_stamp(path)  # before the digests: a file that changes in between is then refused when it is loaded
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
            f"a file of the unknown kind {path.suffix!r}",
            where=str(path),
            remedy=f"Known are {', '.join(FILE_SUFFIXES)}.",
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
            f"{path.name} holds {', '.join(untold)} without its tokenizer, which sdflow does not ship: it is left out. "
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


def digest_work(opened: WeightsFile, component: str, prefix: str, access: Access) -> Callable[[], str]:
    """What gives the digest of a component's tensors, which begin with the prefix; it is remembered."""
    name = opened.digest_name(component)
    return partial(access.digests.value, opened.path, name, lambda path: opened.digest(prefix))


def under(header: Mapping[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    """The tensors whose names begin with the prefix."""
    return {name: entry for name, entry in header.items() if name.startswith(prefix)}


def _describe(opened: WeightsFile) -> _Description:
    path, shapes = opened.path, opened.shapes
    fitting = fitting_architectures(path, shapes)
    said = what_it_says(shapes, opened.metadata)
    if not said and len(fitting) > 1 and path.suffix.lower() != ".gguf" and prod(shapes.get("global_step", (0,))) == 1:
        said += what_the_step_says(int(read_numbers(path, ["global_step"])["global_step"]))
    return _Description(fitting, said, list(shapes))


def _describe_pickle(path: Path) -> str:
    """JSON of a _Description."""
    from sdflow.sources.load import pickled_shapes

    shapes, step = pickled_shapes(path)
    fitting = fitting_architectures(path, shapes)
    said = what_it_says(shapes, {})
    if not said and len(fitting) > 1:
        said += what_the_step_says(step)
    prefixes = [layout.prefix for layout in layouts_of(family_of_architecture(fitting[0]), shapes).values()]
    return json.dumps([fitting, said, prefixes])
