"""Whether there is room for everything that a run will write, before it begins: bound and carried weights, and copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path

from sdflow.artifact import Record
from sdflow.build.chain import BIND_PASS
from sdflow.build.plan import PipelinePlan, Plan
from sdflow.build.planned_step import PlannedStep
from sdflow.build.step import Step
from sdflow.errors import CacheError, SdflowError
from sdflow.families import FAMILIES, part_of
from sdflow.manifest import REFINER, read_manifest
from sdflow.sources.safetensors_file import read_header
from sdflow.store import Cache
from sdflow.store.layout import free_bytes
from sdflow.units import spell_bytes
from sdflow.weights.bind import RESERVE

_HALVES = "OnnxFloatToFloat16"
_QUANTIZES = "Quant"
"""In the names of Olive's passes that do. Four bits in place of 32 are the least that they leave."""
_SHARE_BLOCKS = ("bcachefs", "btrfs", "xfs")
"""File systems within which a copy takes no room (`assemble.copy_file`)."""

_Weights = Mapping[str, int]
"""Type of the elements -> bytes."""


@dataclass
class Wanted:
    """What is to be written, in bytes. binds, carried: by the step's key. copies: of pipelines, by name."""

    binds: dict[str, int] = field(default_factory=dict)
    carried: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)


def require_space(plan: Plan, cache: Cache, *, rebuild: bool = False, copied_to: Path | None = None) -> None:
    """Raises CacheError when what the run will write does not fit on the disk of the cache, or on that of the output folder.

    rebuild: what is in the cache is built anew, beside the old. copied_to: the folder that copies of the pipelines go to.
    What is not known yet is not counted (`bytes_to_write`): BindWeights looks again.
    """
    wanted = bytes_to_write(plan, cache, rebuild=rebuild, copied_to=copied_to)
    copies, wanted.copies = wanted.copies, {}
    if copied_to is not None and _device(copied_to) == _device(cache.root):
        wanted.copies = {} if _shares_blocks(copied_to) else copies
    elif copied_to is not None:
        _require(copied_to, Wanted(copies=copies))
    _require(cache.root, wanted)


def _require(place: Path, wanted: Wanted) -> None:
    kinds = {
        "model* of": wanted.binds,
        "result* of passes that carry the weights,": wanted.carried,
        "copied pipeline* of": wanted.copies,
    }
    free, total = free_bytes(place), sum(sum(sizes.values()) for sizes in kinds.values())
    if not total or total + RESERVE <= free:
        return
    listed = [
        f"{len(sizes)} {what.replace('*', 's' * (len(sizes) > 1))} {spell_bytes(sum(sizes.values()))} together"
        for what, sizes in kinds.items()
        if sizes
    ]
    ways = ["Run fewer at a time", "free some space (sdflow cache gc)"]
    if wanted.binds or wanted.carried:
        ways.append("put the cache on another disk (--cache)")
    if wanted.copies:
        ways.append("put the copies on another disk (--out)")
    raise CacheError(
        f"{' and '.join(listed)} are to be written, with a reserve of {spell_bytes(RESERVE)}, "
        f"and {spell_bytes(free)} are free",
        where=str(place),
        remedy=f"{', '.join(ways[:-1])}, or {ways[-1]}.",
    )


def bytes_to_write(plan: Plan, cache: Cache, *, rebuild: bool = False, copied_to: Path | None = None) -> Wanted:
    """What a run will write, as far as it is known.

    binds: of models whose graph is there. carried: every pass of such a chain writes all the weights, halved by
    OnnxFloatToFloat16; how many is known from the step before, or from the checkpoint's files if they are safetensors and
    this submodel's alone. copies: of pipelines that are not there yet; of their models those that are built or counted here.
    """
    wanted = Wanted()
    for pipeline in plan.pipelines:
        models: dict[str, int] = {}
        digests: dict[str, str | None] = {}
        for prefix, each in (("", pipeline), (f"{REFINER}/", pipeline.refiner)):
            for submodel, steps in _chains(each, cache):
                key, size, record = _count(steps, wanted, cache, rebuild)
                models[key] = size  # what a refiner shares with its base is there once
                digests[prefix + submodel] = record.artifact.digest if record else None
        if copied_to is not None and not _is_there(copied_to / pipeline.pipeline.name, digests):
            wanted.copies[pipeline.pipeline.name] = sum(models.values())
    return wanted


def _chains(plan: PipelinePlan | None, cache: Cache) -> Iterator[tuple[str, list[PlannedStep]]]:
    if plan is not None:
        for submodel, steps in groupby(plan.steps(cache), key=lambda planned: planned.step.submodel):
            yield submodel, list(steps)


def _count(steps: Iterable[PlannedStep], wanted: Wanted, cache: Cache, rebuild: bool) -> tuple[str, int, Record | None]:
    """Add what a chain writes. Returns the key of its last step, the bytes of its result, 0 if unknown, and its record.

    The key of a step whose input is yet to be built is made from the key of the step before: chains that begin alike write
    that part once.
    """
    key, size, record = "", 0, None
    weights: _Weights = {}
    for planned in steps:
        step, record = planned.step, planned.record
        if step.source is None:  # it is not downloaded, and nothing runs
            return key, 0, None
        key = (planned.action or step.action(key or None, cache.salt)).digest
        known = {name: each["bytes"] for name, each in record.facts.get("dtypes", {}).items()} if record else {}
        if step.weights == "carried":
            weights = known or _after(step, weights or _of_checkpoint(step))
            size = record.artifact.bytes if record else sum(weights.values())
            if size and (rebuild or record is None):
                wanted.carried[key] = size
        elif step.name == BIND_PASS:
            size = record.artifact.bytes if record else sum(weights.values())
            if weights and planned.action and (rebuild or record is None):
                wanted.binds[key] = sum(weights.values())
        else:
            weights = known
    return key, size, record


def _after(step: Step, weights: _Weights) -> _Weights:
    """What a pass that carries these weights leaves of them."""
    if step.name == _HALVES:
        return {"float16": sum(size // 2 if name == "float32" else size for name, size in weights.items())}
    if _QUANTIZES in step.name:
        return {"int4": sum(weights.values()) // 8}
    return weights


def _of_checkpoint(step: Step) -> _Weights:
    """What the first pass of a chain reads, in float32; nothing where that is not known."""
    assert step.source is not None
    load = step.source.load
    part = part_of(load, step.submodel)
    if step.index or load["kind"] != "files" or load["pickled"]:
        return {}
    if len(FAMILIES[step.family].components[part.component]) > 1:  # a VAE's file is of two submodels
        return {}
    begins = load.get("prefix") or ""
    found = [entry for stamp in load["files"] for entry in _entries(Path(stamp["path"]), begins)]
    return {"float32": 4 * sum(map(prod, found))}


def _entries(file: Path, begins: str) -> list[tuple[int, ...]]:
    return [entry.shape for name, entry in read_header(file).items() if name.startswith(begins) and "F" in entry.dtype]


# Of disks


def _is_there(folder: Path, digests: Mapping[str, str | None]) -> bool:
    """Whether the folder is a copy of these models: what else is in it is small."""
    try:
        manifest = read_manifest(folder)
        parts = {name: part.artifact for name, part in manifest.parts.items()}
        inside = folder / REFINER
        if manifest.origin.refiner is not None:
            parts |= {f"{REFINER}/{name}": part.artifact for name, part in read_manifest(inside).parts.items()}
    except SdflowError:
        return False
    return manifest.copied and parts == digests


def _device(place: Path) -> int | None:
    """The file system that a path is on, or will be."""
    for each in (place.absolute(), *place.absolute().parents):
        try:
            return each.stat().st_dev
        except OSError:
            continue
    return None


def _shares_blocks(place: Path) -> bool:
    import psutil

    real = place.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda each: len(each.mountpoint)).fstype in _SHARE_BLOCKS
