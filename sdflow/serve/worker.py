"""The process that draws. It is apart from the one that answers, so that a crash takes no connection with it.

It gets jobs over a pipe and gives back what happens to them (`sdflow.serve.jobs`). It ends when the pipe does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from sdflow.errors import SdflowError, VerificationError
from sdflow.serve.jobs import Cancel, End, Failed, Image, Job, Lost, Message, Ready
from sdflow.workers import deny_network

if TYPE_CHECKING:
    from sdflow.serve.served_pipeline import ServedPipeline

WARM_UP = "warm-up"

WAIT_SECONDS = 0.005
"""Between two looks whether what the only jobs wait for is there."""


@dataclass(frozen=True)
class WorkerOptions:
    """pipelines: folders by name. batch_sizes: images of a batch; None: those that a measurement finds worth it. threads: of
    the CPU. checker: whether the safety checkers see the images. cache: that the pipelines were built with; lora_memory: bytes
    of weights with LoRAs that are kept; loras: whether requests will name some."""

    pipelines: Mapping[str, Path]
    batch_sizes: tuple[int, ...] | None = None
    threads: int | None = None
    checker: bool = True
    cache: Path = Path("cache")
    lora_memory: int = 4 << 30
    loras: bool = False


def work(connection: Connection, options: WorkerOptions) -> None:
    """Load the pipelines, say so, and draw until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever started it ends it in order
        signal.signal(number, signal.SIG_IGN)
    deny_network()
    try:
        _draw(connection, options)
    except SdflowError as error:
        connection.send(Lost(type(error).__name__, error.what, error.where, error.remedy))
    except (EOFError, BrokenPipeError):  # nobody is there any more
        pass
    sys.stderr.flush()
    os._exit(0)  # no exit handlers: some libraries send their telemetry there


def _draw(connection: Connection, options: WorkerOptions) -> None:
    import torch

    from sdflow.serve.engine import Engine
    from sdflow.serve.ready_pipelines import ReadyPipelines
    from sdflow.serve.served_pipeline import ServedPipeline

    # What torch computes here is small. Each thread that draws would have more of torch's own, which spin beside ONNX Runtime's.
    torch.set_num_threads(1)
    pipelines = {
        name: ServedPipeline.load(folder, options.threads, options.checker)
        for name, folder in options.pipelines.items()
    }
    seconds = {name: _warm(name, pipeline, options) for name, pipeline in pipelines.items()}
    found = {
        name: ReadyPipelines(options.pipelines[name], pipeline, options.cache, options.lora_memory)
        for name, pipeline in pipelines.items()
    }
    engine = Engine(
        lambda job: found[job.pipeline].find(job),
        seconds,
        connection.send,
        ready=lambda job, begin: found[job.pipeline].ready(job, begin=begin),
    )
    told = {name: {"batch_seconds": seconds[name], "alone": pipeline.why_alone} for name, pipeline in pipelines.items()}
    if options.loras:
        for name, pipeline in pipelines.items():
            warm = partial(_warm, name, options=options)
            found[name].prepare(warm_up_job(name, pipeline), list(seconds[name]), warm)
    connection.send(Ready(told))
    while True:
        if not engine.drawing:
            connection.poll(WAIT_SECONDS if engine.busy else None)
        while connection.poll(0):
            message = connection.recv()
            if isinstance(message, Job):
                engine.submit(message)
            elif isinstance(message, Cancel):
                engine.cancel(message.request)
            elif isinstance(message, End):
                return
        engine.turn()


def _warm(name: str, pipeline: ServedPipeline, options: WorkerOptions) -> dict[int, float]:
    """Draw once, so that what the first image would wait for is there; seconds of a run by size of the batch."""
    from sdflow.serve.engine import Engine

    said: list[Message] = []
    engine = Engine(lambda job: pipeline, {name: {1: 1.0}}, said.append)
    engine.submit(warm_up_job(name, pipeline))
    while engine.busy:
        engine.turn()
    for failed in said:
        if isinstance(failed, Failed):
            raise VerificationError(f"cannot draw: {failed.what}", where=str(options.pipelines[name]))
    if pipeline.why_alone is not None:
        return {1: 1.0}
    return pipeline.measure(options.batch_sizes)


def warm_up_job(name: str, pipeline: ServedPipeline) -> Job:
    """The least that takes every submodel of a pipeline along: of the model's own size, with what it must start from."""
    base = pipeline.base
    side, task = base.latents.image_size, base.task
    image = None if task == "text" else Image("RGB", (side, side), b"\x80" * (3 * side * side))
    mask = Image("L", (side, side), b"\xff" * (side * side)) if task == "inpaint" else None
    few = replace(base.defaults[task], steps=2 if len(pipeline.stages) == 1 else 10)
    steps = {"num_inference_steps": few.steps_at(few.strength)}
    return Job(WARM_UP, 0, name, "a warm-up", 0, arguments=steps, image=image, mask=mask)
