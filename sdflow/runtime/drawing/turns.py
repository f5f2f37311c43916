"""Decide whether a pipeline's weights all stay on its GPU, take turns on it, or are streamed to it from host memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.errors import SlowerWarning, TargetUnavailableError, UsageError
from sdflow.families.shared.base import Family
from sdflow.machine.memory import HOST, available_bytes
from sdflow.models.ports import Role
from sdflow.runtime.files.folder import folder_configs, folder_defaults, folder_family
from sdflow.runtime.kernels.library import operator_library
from sdflow.runtime.memory_limit import device_run_bytes, drawing_bytes
from sdflow.runtime.sessions.moving_memory import HOST_SHARE
from sdflow.runtime.sessions.residency import HEADROOM, Keep, Residency, reserved, residency
from sdflow.runtime.sessions.session import read_graph
from sdflow.runtime.sessions.stream_plan import StreamBuffers, StreamPlan, buffer_size, is_half, stream_plan
from sdflow.targets import Target
from sdflow.units import spell_bytes


@dataclass(frozen=True)
class Moves:
    """How weights move. residency: manages those that take turns. streams: submodel -> plan, for those that are streamed."""

    residency: Residency
    streams: Mapping[str, StreamPlan] = field(default_factory=dict)


def weight_bytes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the size of each submodel's data file, if it has one."""
    files = {name: folder / name / WEIGHTS_FILE for name in names}
    return {name: file.stat().st_size for name, file in files.items() if file.exists()}


def moving_weights(
    folder: Path,
    names: Sequence[str],
    target: Target,
    keep: Keep,
    device_memory: int | None,
    other_weights: int = 0,
    device: str = "cuda",
    changing: bool = False,
) -> Moves | None:
    """Return how these submodels' weights move, or None if all stay: on the CPU, with keep "all", or if they fit along with
    the working memory of one image of the model's own size with guidance.

    A submodel's weights are streamed if they do not fit by themselves. They are also streamed, where this is possible, if
    they fit but leave too little for the denoiser's working memory.

    device_memory: limit in bytes for this process, without CUDA's context; None: all free memory. other_weights: bytes of
    further weights on the device. device: a GPU, in torch's notation. changing: whether LoRAs may be chosen per request;
    then only weights that do not fit by themselves are streamed. Warns with SlowerWarning if a submodel's weights are
    streamed, or should be but cannot be. Raises UsageError if they do not fit even so.
    """
    if target.name != "cuda" or keep == "all":
        return None
    configs, family = folder_configs(folder), folder_family(folder)
    sizes = weight_bytes(folder, names)
    working = drawing_bytes(family, configs, family.latents(configs).size, device="cuda")
    places = residency(device, device_memory)
    room = places.room()
    fits = not sizes or sum(sizes.values()) + other_weights + working + HEADROOM <= room
    if fits:
        return None if device_memory is None else Moves(places)
    kept = reserved(_denoiser_bytes(folder, family, configs))
    alone = [name for name, size in sizes.items() if size + HEADROOM > room]
    large = [name for name, size in sizes.items() if size + (HEADROOM if changing else kept) > room]
    graphs = {name: read_graph(folder / name / MODEL_FILE) for name in large if _streams(family, configs, name)}
    lacking = _lacking(device) if graphs else None
    buffers = StreamBuffers(max(map(buffer_size, graphs.values()), default=0))
    streams: dict[str, StreamPlan] = {}
    host, whole = available_bytes(HOST), dict[str, list[str]]()
    for name in sorted(large, key=lambda name: name not in alone):
        plan, why = None, lacking
        if name in graphs and why is None:
            latents = None if name in family.text_of(configs) else _latents(family, configs, name)
            plan = stream_plan(graphs[name], room - kept - 2 * buffers.size, buffers, latents)
            if plan is not None and plan.size >= HOST_SHARE * host:
                why = f"the {_spelled(name)} would take too much of this computer's memory ({spell_bytes(plan.size)})"
        if plan is not None and (name in alone or why is None):
            streams[name] = plan
            host -= plan.size
        elif name in alone:
            reason = f"; they cannot be streamed: {lacking}" if lacking and name in graphs else ""
            raise UsageError(
                f"its {_spelled(name)} has {spell_bytes(sizes[name])} of weights, but {device} has only "
                f"{spell_bytes(max(0, room))} available, {spell_bytes(HEADROOM)} of it for working memory{reason}",
                where=str(folder),
                remedy="Quantize it (QuantizeFp8), or use the CPU: --target cpu.",
            )
        elif why is not None and name in graphs:
            whole[why] = [*whole.get(why, []), _spelled(name)]
    for why, names_of in whole.items():
        _warn(
            f"the weights of the {' and the '.join(names_of)} take turns with others instead of being streamed, which leaves "
            f"little working memory: {why}"
        )
    for name, plan in streams.items():
        _warn(
            f"the {_spelled(name)} streams {spell_bytes(plan.size)} of its {spell_bytes(sizes[name])} of weights from host "
            f"memory, because {device} has only {spell_bytes(room)} available"
        )
    return Moves(places, streams)


def _warn(text: str) -> None:
    """Warn at the line that loads the pipeline, two callers above `moving_weights`."""
    warnings.warn(text, SlowerWarning, stacklevel=4)


def _spelled(name: str) -> str:
    return name.replace("_", " ")


def _lacking(device: str) -> str | None:
    """Return why weights cannot be streamed to this device; None if they can."""
    try:
        operator_library(int(device.partition(":")[2] or 0))
    except (TargetUnavailableError, UsageError) as error:
        return error.what
    return None


def _streams(family: Family, configs: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    """Whether a submodel's weights may be streamed: not those of the VAE, which are few."""
    return name in (family.denoiser, *family.nets(configs).values(), *family.text_of(configs))


def _latents(family: Family, configs: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Return the name of the input that changes from step to step."""
    return family.part(name).of(configs[name]).ports(configs[name]).of(Role.LATENTS)


def _denoiser_bytes(folder: Path, family: Family, configs: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the working memory of the denoiser and its ControlNets, which their sessions retain, for one image of the
    model's own size."""
    guided = family.guided(configs, folder_defaults(folder)["text"].guidance_scale)
    side = family.latents(configs).size
    return (2 if guided else 1) * sum(
        device_run_bytes(family, name, configs[name], side, half=is_half(read_graph(folder / name / MODEL_FILE)))
        for name in (family.denoiser, *family.nets(configs).values())
    )
