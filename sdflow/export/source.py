"""Read a pipeline folder for export. Only pipelines that generate from text alone are supported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import Approximation
from sdflow.families.shared.base import Family
from sdflow.families.shared.latents import Latents
from sdflow.manifest import MANIFEST_FILE, read_manifest
from sdflow.runtime.files.folder import (
    folder_adapters,
    folder_defaults,
    folder_family,
    folder_task,
    load_companions,
    onnx_submodels,
    read_options,
    submodel_config,
)


@dataclass(frozen=True)
class Source:
    """The content of a pipeline folder. submodels: the exported ones, in order. configs: of these. options: of
    model_index.json, as the family reads them. companions: loaded."""

    folder: Path
    family: Family
    submodels: tuple[str, ...]
    configs: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]
    companions: Mapping[str, Any]


@dataclass(frozen=True)
class Size:
    """The number of images, and the rows and columns of latents."""

    images: int
    rows: int
    columns: int


def open_source(folder: Path, place: Path, *, checker: bool) -> Source:
    """place: the export's folder. checker: include the safety checker, if any.

    Raises UsageError for a pipeline that needs more than text, and for a place within it.
    """
    family, there = folder_family(folder), onnx_submodels(folder)
    if (task := folder_task(folder)) != "text" or not set(family.drawing) <= set(there):
        raise UsageError(
            "this pipeline starts from an image" if task != "text" else "the pipeline is not complete",
            where=str(folder),
            remedy="Exports generate from text alone: use a text-to-image pipeline.",
        )
    kinds = {"ControlNets": family.nets(there), "IP-Adapters": folder_adapters(folder)}
    if images := [kind for kind, found in kinds.items() if found]:
        raise UsageError(
            f"the pipeline has {' and '.join(images)}, which take images besides texts",
            where=str(folder),
            remedy="Export one that was built without them.",
        )
    _require_outside(place, folder, there)
    wanted = [name for name in there if name in family.drawing or (checker and name == family.checker)]
    configs = {name: submodel_config(folder, name) for name in wanted}
    return Source(folder, family, tuple(wanted), configs, read_options(folder), load_companions(folder))


def _require_outside(place: Path, folder: Path, submodels: Sequence[str]) -> None:
    """Raises UsageError for the pipeline's own folders, where a file could replace a model."""
    own = {folder.resolve(), *((folder / name).resolve() for name in submodels)}
    if own & {place.resolve(), *place.resolve().parents}:
        raise UsageError("is inside the pipeline", where=str(place), remedy="Name a place outside of it.")


def guidance_of(folder: Path, scale: float | None) -> float:
    """A guidance scale; None: the pipeline's default. Raises UsageError for an invalid one."""
    if scale is None:
        return float(folder_defaults(folder)["text"].guidance_scale)
    if not math.isfinite(scale):
        raise UsageError(
            f"{scale} is not a guidance scale", where="--guidance-scale", remedy="Use a number; around 7.5 is usual."
        )
    return scale


def left_out(folder: Path) -> tuple[str, ...]:
    """Parts of `sdflow generate` that an export lacks, each with the option that disables it there."""
    if not (folder / MANIFEST_FILE).exists():
        return ()
    origin = read_manifest(folder).origin
    found = [
        f"{Approximation.of(**{name: value}).spelled()}: the result is as with --{name.replace('_', '-')} off"
        for name, value in Approximation.chosen(origin.said, None, None).settings().items()
    ]
    if origin.refiner is not None:
        found.append("the refiner: the result is as with --refiner-start 1")
    return tuple(found)


def latents_data(what: Latents, size: Size | None = None) -> dict[str, int]:
    """Latents for programs: the fixed size, or the model's own; pixels: per latent along each axis; multiple: see
    `Latents`."""
    rows, columns = (what.size, what.size) if size is None else (size.rows, size.columns)
    sizes = {"rows": rows, "columns": columns, "multiple": what.multiple}
    return {"channels": what.channels, **sizes, "pixels": what.scale}
