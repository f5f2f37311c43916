"""Load, warm up and measure the pipelines of a server, in each of its lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.errors import UsageError, VerificationError
from sdflow.machine.device import cores
from sdflow.machine.memory import HOST, available_bytes
from sdflow.manifest import read_manifest
from sdflow.processes.in_worker import limit_memory
from sdflow.runtime.memory_limit import most_pixels_of
from sdflow.serve.engine.pulse import LEAST_SECONDS, TIMES, Patience
from sdflow.serve.engine.waiting import worthwhile_sizes
from sdflow.serve.jobs import Failed, Image, Job, Message
from sdflow.targets import find_target

if TYPE_CHECKING:
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.serve.engine.served_pipeline import ServedPipeline
    from sdflow.serve.jobs import WorkerOptions

MEASURED_RUNS = 5
"""Denoiser runs per batch size."""


@dataclass(frozen=True)
class LoadedLane:
    """The pipelines of one lane."""

    pipelines: dict[str, ServedPipeline]
    seconds: dict[str, Mapping[int, float]]  # of a denoiser run by pipeline and worthwhile batch size
    first: float  # seconds to load all pipelines and generate one image with each
    threads: int | None = None  # per session


def load_lanes(options: WorkerOptions) -> list[LoadedLane]:
    """Load each lane, with its share of the threads. Raises VerificationError if a pipeline cannot generate, UsageError
    for several lanes on a GPU."""
    if options.lanes == 1:
        return [_load(options, options.threads)]
    threads = max(1, (options.threads or cores() or 1) // options.lanes)
    found = [_load(options, threads)]
    for name, each in found[0].pipelines.items():
        if each.base.place.stream is not None:
            words = f"{name} runs on a GPU, which supports only one lane"
            raise UsageError(words, where="--lanes", remedy="Omit it: batching keeps the GPU busy.")
    return found + [_load(options, threads) for _ in range(options.lanes - 1)]


def _load(options: WorkerOptions, threads: int | None) -> LoadedLane:
    begun = time.perf_counter()
    pipelines = {name: load(folder, threads, options) for name, folder in options.pipelines.items()}
    seconds: dict[str, Mapping[int, float]] = {name: warm(name, each, options) for name, each in pipelines.items()}
    return LoadedLane(pipelines, seconds, time.perf_counter() - begun, threads)


def load(folder: Path, threads: int | None, options: WorkerOptions) -> ServedPipeline:
    """Load a pipeline with these options. Raises like `ServedPipeline.load`."""
    from sdflow.serve.engine.served_pipeline import ServedPipeline

    made = ServedPipeline.load(folder, threads, options.checker, options.embeddings, options.gpu_share, options.loras)
    for stage in made.stages:
        stage.most_chunks = options.chunks
    return made


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.resolve().glob("*/*") if path.is_file())


def with_room(options: WorkerOptions) -> WorkerOptions:
    """Keep only as many of the first pipelines as may be loaded together."""
    if options.memory is None:
        return options
    taken, left = dict[str, Path](), options.memory
    for name, folder in options.pipelines.items():
        left -= folder_bytes(folder)
        if taken and left < 0:
            break
        taken[name] = folder
    return replace(options, pipelines=taken)


def patience_of(lane: LoadedLane, options: WorkerOptions, pixels: Mapping[str, int]) -> Patience:
    """Return the configured stall time, or a multiple of the first load. Providers that compile for each new size, such
    as TensorRT, get the time of a whole request. pixels: default image size by pipeline."""
    if options.stall is not None:
        return Patience(options.stall, options.stall, pixels)
    targets = [
        find_target(read_manifest(folder).origin.target, str(folder)).session for folder in options.pipelines.values()
    ]
    compiles = any(each.profiles or each.static_shapes for each in targets)
    measured = options.deadline if compiles else TIMES * lane.first
    return Patience(max(LEAST_SECONDS, min(measured, options.deadline)), max(LEAST_SECONDS, options.deadline), pixels)


def warm(name: str, pipeline: ServedPipeline, options: WorkerOptions) -> dict[int, float]:
    """Generate one image to warm up, and return the seconds of a denoiser run by batch size."""
    from sdflow.serve.engine.engine import Engine

    said: list[Message] = []
    engine = Engine(lambda job: pipeline, {name: {1: 1.0}}, said.append)
    engine.submit(warm_up_job(name, pipeline))
    engine.run_all()
    for failed in said:
        if isinstance(failed, Failed):
            folder = options.pipelines.get(name, name)
            remedy = f"`sdflow verify {folder}` finds a faulty submodel."
            raise VerificationError(f"cannot generate: {failed.what}", where=str(folder), remedy=remedy)
    return measured_seconds(pipeline, options.batch_sizes)


def measured_seconds(
    pipeline: ServedPipeline, sizes: Sequence[int] | None = None, busy: Callable[[], bool] = lambda: False
) -> dict[int, float]:
    """Return the seconds of a denoiser run at the model's own size, for these or for all worthwhile batch sizes, and
    release the memory of other sizes. busy: whether to stop before the next size, with those measured so far."""
    from sdflow.serve.engine.shared_steps import NO_MEMORY

    stage, side = pipeline.base, pipeline.base.latents.size
    steps = pipeline.shared_steps(side, side)
    if steps is None:
        return {1: 1.0}

    def measured(size: int) -> float | None:
        if busy():
            return None
        with stage.place.current():
            try:
                return steps.seconds(size, runs=MEASURED_RUNS, halves=halves, schedule=schedule, busy=busy)
            except NO_MEMORY:
                return None

    own = stage.defaults["text"]
    halves = 2 if stage.family.guided(stage.configs, own.guidance_scale) else 1
    schedule = stage.schedule(own.steps, (side, side), guidance_scale=None)
    if sizes is None:
        found = worthwhile_sizes(measured)
    else:
        found = {size: taken for size in sizes if (taken := measured(size)) is not None}
    if not busy():
        steps.keep(found)
    return found


def warm_up_job(name: str, pipeline: ServedPipeline) -> Job:
    """Return the smallest job that runs every submodel of a pipeline, at the model's own size and with a start image
    and mask if the task needs them."""
    base = pipeline.base
    side, task = base.latents.image_size, base.task
    image = None if task == "text" else Image("RGB", (side, side), b"\x80" * (3 * side * side))
    mask = Image("L", (side, side), b"\xff" * (side * side)) if task == "inpaint" else None
    few = replace(base.defaults[task], steps=2 if len(pipeline.stages) == 1 else 10)
    steps = {"num_inference_steps": few.steps_at(few.strength)}
    return Job("warm-up", 0, name, "a warm-up", 0, arguments=steps, image=image, mask=mask)


def _most_pixels(stage: Pipeline) -> int:
    places = stage.submodels[stage.family.denoiser].residency
    available = None if places is None else places.room()  # a share of a GPU, or what weights that take turns leave
    return most_pixels_of(stage.family, stage.configs, available, device=stage.place.device)


@dataclass(frozen=True)
class Room:
    """Pixels per image by pipeline. own: the model's own size. most: the maximum."""

    own: dict[str, int]
    most: dict[str, int]

    @classmethod
    def measured(cls, lane: LoadedLane) -> Room:
        """Measure this process now. On the CPU, limit it to the available memory: a run that exceeds it then fails
        alone, instead of the kernel killing the process."""
        import psutil

        room = cls({}, {})
        for name, pipeline in lane.pipelines.items():
            room.add(name, pipeline)
        now = getattr(psutil.Process().memory_info(), "data", None)  # Linux
        if now is not None and all(each.base.place.device == HOST for each in lane.pipelines.values()):
            limit_memory(now + available_bytes() + psutil.swap_memory().free)
        return room

    def add(self, name: str, loaded: ServedPipeline) -> None:
        self.own[name] = loaded.base.latents.image_size**2
        self.most[name] = min(_most_pixels(stage) for stage in loaded.stages)

    def share(self, job: Job) -> float:
        """Return the fraction of memory that an image takes; 0 up to the model's own size, which always fits."""
        pixels = job.arguments.get("height", 0) * job.arguments.get("width", 0)
        return float(pixels / self.most[job.pipeline]) if pixels > self.own[job.pipeline] else 0.0
