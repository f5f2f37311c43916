"""A pipeline folder: its contents, and loading its submodels on a target."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdflow.artifact import CONFIG_FILE, INDEX_FILE, MODEL_FILE
from sdflow.disk.input_file import read_json
from sdflow.errors import CheckpointError, UsageError
from sdflow.families import FAMILIES, family_of_index
from sdflow.families.shared.base import ONNX_COMPONENT, Family
from sdflow.families.shared.defaults import Defaults, Task
from sdflow.families.shared.image_prompts import adapter_count
from sdflow.families.shared.latents import Latents
from sdflow.machine.lean_imports import import_diffusers_alone, import_module_alone
from sdflow.manifest import MANIFEST_FILE, REFINER, read_manifest
from sdflow.runtime.files.trial import try_companion
from sdflow.runtime.sessions.device_weights import DeviceWeights
from sdflow.runtime.sessions.engine_cache import Profile, Shapes, keeps_engines
from sdflow.runtime.sessions.live_weights import LiveWeights
from sdflow.runtime.sessions.place import device_name, place
from sdflow.runtime.sessions.residency import Residency
from sdflow.runtime.sessions.session import DAMAGED, PLAIN, LoadOptions, create_session
from sdflow.runtime.sessions.stream_plan import StreamPlan, is_half
from sdflow.runtime.sessions.submodel import Edit, Submodel, read_edited
from sdflow.sources.load import load_companion
from sdflow.targets import Target, find_target

SCHEDULER = "scheduler"
"""Name of the scheduler companion in every family."""

TAKEN_APART = ("cpu", "cuda")
"""Targets that run parts of a graph (`Submodel.path`). Others compile each graph for each shape, which is slow."""


def folder_family(folder: Path) -> Family:
    """Return the family of a pipeline folder from its model_index.json.

    Raises UsageError if there is no pipeline, or one of an unknown class.
    """
    index = read_index(folder)
    if (family := family_of_index(index, assembled=True)) is not None:
        return family
    name = index.get("_class_name")
    known = ", ".join(name for family in FAMILIES.values() for name in family.assembled_as.values())
    raise UsageError(f"unknown pipeline class {name!r}; known are {known}", where=str(folder / INDEX_FILE))


def refiner_of(folder: Path) -> Path | None:
    """Return the pipeline folder of its refiner, as recorded in sdflow.json; None without one. Raises UsageError if it
    does not exist."""
    refiner = read_manifest(folder).origin.refiner if (folder / MANIFEST_FILE).exists() else None
    if refiner is None:
        return None
    found = folder / refiner
    if not found.is_dir():
        raise UsageError(f"its refiner {found} does not exist", where=str(folder), remedy=DAMAGED)
    return found


def every_artifact(folder: Path) -> dict[str, str]:
    """Return the artifact digest of each submodel; the refiner's are named `refiner/SUBMODEL`."""
    refiner, found = refiner_of(folder), read_manifest(folder).artifacts
    if refiner is None:
        return found
    return found | {f"{REFINER}/{name}": digest for name, digest in read_manifest(refiner).artifacts.items()}


def read_index(folder: Path) -> dict[str, Any]:
    """Return model_index.json. Raises UsageError if there is no pipeline."""
    index = folder / INDEX_FILE
    if not index.is_file():
        raise UsageError(
            f"there is no pipeline here: {INDEX_FILE} is missing",
            where=str(folder),
            remedy="Name a pipeline folder; `sdflow run` builds one.",
        )
    return _read_json(index)


def read_options(folder: Path) -> dict[str, Any]:
    """Return the entries of model_index.json that the family reads, with diffusers' defaults."""
    index = read_index(folder)
    return {name: index.get(name, default) for name, default in folder_family(folder).options.items()}


def onnx_submodels(folder: Path) -> list[str]:
    """Return the ONNX submodels of a pipeline folder, in order. Raises UsageError if there is no pipeline."""
    components = read_index(folder)
    return list(folder_family(folder).ordered(name for name in components if components[name] == ONNX_COMPONENT))


def folder_latents(folder: Path) -> Latents:
    """Return the properties of a folder's latents. Raises UsageError if a config lacks them."""
    family = folder_family(folder)
    try:
        return family.latents(folder_configs(folder))
    except (KeyError, TypeError, ValueError, CheckpointError) as error:
        what = f"has no entry {error}" if isinstance(error, KeyError) else f"is invalid: {error}"
        raise UsageError(f"a config.json of the submodels {what}", where=str(folder), remedy=DAMAGED) from error


def folder_defaults(folder: Path) -> dict[Task, Defaults]:
    """Return the default settings of a pipeline folder for each task.

    Raises UsageError if the denoiser or the scheduler's config is missing.
    """
    family = folder_family(folder)
    configs = {family.denoiser: submodel_config(folder, family.denoiser)}
    said = read_manifest(folder).origin.said if (folder / MANIFEST_FILE).exists() else {}
    scheduler = folder / SCHEDULER / family.companions[SCHEDULER].file
    return family.defaults_of(configs, _read_json(scheduler, finite=False), said)


def folder_task(folder: Path) -> Task:
    """Return the task that a pipeline folder is made for. Raises UsageError if a config cannot be read."""
    return folder_family(folder).task(folder_configs(folder))


def folder_needed(folder: Path) -> tuple[str, ...]:
    """Return the submodels that a pipeline folder requires. Raises UsageError if a config cannot be read."""
    return folder_family(folder).needed(folder_configs(folder))


def folder_adapters(folder: Path) -> int:
    """Return the number of IP-Adapters of a pipeline folder. Raises UsageError if a config cannot be read."""
    return adapter_count(submodel_config(folder, folder_family(folder).denoiser))


def folder_configs(folder: Path) -> dict[str, Config]:
    """Return the config of each submodel of a pipeline folder."""
    return {name: submodel_config(folder, name) for name in onnx_submodels(folder)}


SIZES = (
    "hidden_size", "in_channels", "latent_channels", "max_position_embeddings", "out_channels", "projection_dim",
    "sample_size", "time_cond_proj_dim",
)  # fmt: skip
"""Config entries that determine memory sizes at run time."""

MOST = 1 << 20


def _are_levels(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(each) is int and 0 < each <= MOST for each in value))


READ_ENTRIES: Mapping[str, Callable[[Any], bool]] = {
    "block_out_channels": _are_levels,
    "decoder_block_out_channels": _are_levels,
    "scaling_factor": lambda value: type(value) in (int, float) and value != 0,
}
"""Config entries used in computations -> whether a value is valid."""


class Config(dict[str, Any]):
    """A config.json. A missing entry raises UsageError naming the entry and the file."""

    def __init__(self, entries: Mapping[str, Any], path: Path) -> None:
        super().__init__(entries)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise UsageError(f"has no entry {name!r}", where=str(self.path), remedy=DAMAGED)


def submodel_config(folder: Path, submodel: str) -> Config:
    """Return the config.json of one submodel. Raises UsageError if it is missing or damaged."""
    path = folder / submodel / CONFIG_FILE
    config = Config(_read_json(path), path)
    side = config.get("sample_size")
    if isinstance(side, list) and len(side) == 2 and side[0] == side[1]:  # allowed by diffusers
        config["sample_size"] = side[0]
    for name in SIZES:
        size = config.get(name)
        if size is not None and (type(size) is not int or not 0 < size <= MOST):
            raise UsageError(f"its {name} is {size!r:.40}", where=str(path), remedy=DAMAGED)
    for name, fits in READ_ENTRIES.items():
        if name in config and not fits(config[name]):
            raise UsageError(f"its {name} is {config[name]!r:.40}", where=str(path), remedy=DAMAGED)
    return config


def load_submodel(
    folder: Path,
    submodel: str,
    target: Target,
    *,
    family: Family | None = None,
    shapes: Shapes | None = None,
    cuda_graphs: Container[str] | None = None,
    lazy: bool = False,
    options: LoadOptions = PLAIN,
    live: LiveWeights | None = None,
    shared: DeviceWeights | None = None,
    residency: Residency | None = None,
    shrinks: bool = False,
    plan: StreamPlan | None = None,
    delay: int = 0,
    device: int = 0,
) -> Submodel:
    """Load one submodel of a pipeline folder on a target. Its sessions run on its place's stream.

    family: default: the folder's. shapes: input shapes for targets with static shapes. cuda_graphs: submodels that may
    be captured; None: all. lazy: create the session on first use, as always for one session per set of shapes. live:
    external weights that its sessions read. shared: device weights of the same model, if already loaded. residency:
    manages weights that take turns on the device; None: they stay. shrinks: return a run's working memory to the device
    afterwards; such runs are not captured. plan: weights that are streamed to the device in every run. delay: see
    `StreamedWeights`. device: number of the GPU.
    """
    where = place(device_name("cuda" if target.session.needs_cuda else "cpu", device))
    model = (folder / submodel / MODEL_FILE).resolve()
    captured = cuda_graphs is None or submodel in cuda_graphs
    fixed = plan is not None or (target.name == "cuda" and captured)
    if where.stream is not None:
        options = replace(options, stream=where.stream.cuda_stream, device=where.index)
    weights = (shared or DeviceWeights(model, where.device, residency, plan, delay=delay)) if fixed else None
    config = submodel_config(folder, submodel)
    part = (family or folder_family(folder)).part(submodel).of(config)

    options = replace(options, built_for=_built_for(folder))
    known = keeps_engines(target) and (folder / MANIFEST_FILE).exists()
    artifact = read_manifest(folder).artifacts.get(submodel) if known else None

    def load(
        wanted: Shapes | None,
        graph: Any = None,
        capture: bool = False,
        edits: Sequence[Edit] = (),
        profile: Profile | None = None,
    ) -> Any:
        held = None
        inputs: dict[str, Any] = {}
        with where.current():
            streams = None if weights is None else weights.streams()
        if graph is None and (edits or live is not None or streams is not None):
            graph = read_edited(model, edits)
        if live is not None:
            graph, inputs = live.open(graph)
        if weights is not None and graph is not None:
            with where.current():
                held = weights.of(graph)
        resident = None if weights is None else weights.resident
        with nullcontext() if resident is None else resident.using(), where.selected():
            session = create_session(
                model,
                target,
                options,
                shapes=wanted or shapes,
                graph=graph,
                weights=held,
                live=inputs,
                streams=streams,
                capture=capture and fixed and captured and not shrinks,
                artifact=artifact,
                profile=profile,
            )
        session.resident, session.shrinks = resident, shrinks
        if weights is not None and graph is not None:
            session.working = int(weights.working * part.model.device_factor / (2 if is_half(graph) else 1))
        return session

    loaded = Submodel(
        load,
        part,
        config,
        where,
        static_shapes=target.session.static_shapes,
        profiles=target.session.profiles,
        path=model if target.name in TAKEN_APART else None,
        fixed=fixed,
        outputs=None if part.read is None else part.read(config),
        weights=weights,
        residency=residency,
    )
    if not lazy and not fixed and (shapes is not None or not target.session.profiles):
        loaded.load(shapes)
    return loaded


def target_of(folder: Path, target: str | Target | None) -> Target:
    """Return the target by name; None: the one that the folder was built for. Raises UsageError for unknown targets,
    and if the folder is not an sdflow pipeline."""
    if target is None:
        return find_target(read_manifest(folder).origin.target, str(folder / MANIFEST_FILE))
    return find_target(target, "target") if isinstance(target, str) else target


def _built_for(folder: Path) -> str | None:
    """Return the target that the folder was built for, or None if unknown."""
    with suppress(UsageError):
        return read_manifest(folder).origin.target
    return None


def import_companions(folder: Path) -> None:
    """Import what loads a folder's companions, without what else comes with it (`sdflow.machine.lean_imports`). Call this
    in a process that only draws, before it starts threads."""
    import_diffusers_alone()
    for companion in folder_family(folder).companions.values():
        if companion.module:
            import_module_alone(companion.library, companion.module)


def load_companions(folder: Path, submodels: Container[str] | None = None) -> dict[str, Any]:
    """Load a folder's tokenizers, scheduler and feature extractor (if any), by name.

    submodels: load what these need; None: all. Raises UsageError if one is missing or damaged.
    """
    family, there = folder_family(folder), onnx_submodels(folder) if submodels is None else submodels
    loaded = {}
    for name, companion in family.companions.items():
        if not companion.wanted(there):
            continue
        if not (folder / name).is_dir():
            raise UsageError("there is no such folder", where=str(folder / name), remedy=DAMAGED)
        try:
            loaded[name] = load_companion(companion, folder / name, str(folder / name))
        except CheckpointError as error:
            what = error.what.removeprefix(f"its {name} ")  # `where` names the folder
            raise UsageError(what, where=error.where, remedy=DAMAGED) from error
        try_companion(loaded[name], str(folder / name), DAMAGED)
    lengths = {name: loaded[name].model_max_length for name in family.of_one_length if name in loaded}
    if len({*lengths.values()}) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(
            f"the tokenizers have different lengths, but the denoiser requires equal ones: {counts}",
            where=str(folder),
            remedy="Set the same model_max_length in the checkpoint's tokenizer_config.json files, and rebuild.",
        )
    return loaded


def _read_json(path: Path, *, finite: bool = True) -> dict[str, Any]:
    try:
        return dict(read_json(path, finite=finite))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), remedy=DAMAGED) from error
