"""Measure the overhead of the server's engine around denoiser runs, by batch size, for single and concurrent images.

    python benchmarks/serve/engine_overhead.py PIPELINE [--steps 20] [--images 1 8 24] [--out FILE]

In one process, without HTTP. A turn lasts from one batch of steps to the next. It includes ONNX Runtime's call, which
on the CPU is the computation, and waiting for the device (a GPU computes one run while the next is queued). The rest is
the engine's: threads, copies, factors, messages. Reports medians of turns in which no image started or ended.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

PROMPT = "a photo"
SIZES = (1, 2, 4, 8)
clock = time.perf_counter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--images", type=int, nargs="+", default=(1, 8, 24))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--size", type=int, help="pixels of a side")
    parser.add_argument("--together", type=int, help="images of every batch, whatever pays")
    parser.add_argument(
        "--processor", action="store_true", help="seconds of the processor: on a machine with other work"
    )
    parser.add_argument("--no-checker", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    import torch

    global clock
    clock = time.process_time if given.processor else clock
    from sdflow.serve.engine.loading import measured_seconds
    from sdflow.serve.engine.served_pipeline import ServedPipeline

    torch.set_num_threads(1)
    begun = time.perf_counter()
    pipeline = ServedPipeline.load(given.pipeline, given.threads, not given.no_checker)
    size = {} if given.size is None else {"height": given.size, "width": given.size}
    drawn(pipeline, 1, {**size, "num_inference_steps": 2}, {1: 1.0})
    found: dict[str, Any] = {"first image": time.perf_counter() - begun}
    seconds = measured_seconds(pipeline, [given.together] if given.together else SIZES)
    found["batches"] = seconds
    for images, taken in seconds.items():
        print(f"a batch of {images}: {1000 * taken:.2f} ms, {1000 * taken / images:.2f} an image", flush=True)
    drawn(
        pipeline, max(given.images), {**size, "num_inference_steps": 2}, seconds
    )  # what each size takes in the engine
    call = {**size, "num_inference_steps": given.steps}
    own = [pipelines_call(pipeline, call) for _ in range(given.rounds + 1)]
    found["pipeline"] = statistics.median(each[0] for each in own[1:]), statistics.median(each[1] for each in own[1:])
    alone, file = found["pipeline"]
    print(f"the pipeline's own call: {1000 * alone:.1f} ms, its PNG file {1000 * file:.1f}", flush=True)
    for images in given.images:
        rounds = [drawn(pipeline, images, call, seconds) for _ in range(given.rounds)]
        best = found[f"{images} images"] = min(rounds, key=lambda each: each["wall"])
        words = ", ".join(f"{name} {1000 * value:.2f}" for name, value in best["turn"].items())
        stages = ", ".join(f"{name} {1000 * value:.0f}" for name, value in best["stages"].items())
        rate, files = images / best["wall"], best.pop("files")
        best["dB"] = decibels(pipeline, call, files)
        print(
            f"{images} in the engine: {best['wall']:.3f} s, {rate:.2f} images/s; {best['turns']} turns, sizes {best['sizes']}; "
            f"ms a turn: {words}; ms an image: {stages}; dB from the pipeline's own: {best['dB']}",
            flush=True,
        )
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


def pipelines_call(pipeline: Any, call: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a call of the pipeline itself, and of its file."""
    begun = time.perf_counter()
    image = alone(pipeline, 1, call)
    called = time.perf_counter()
    image.save(io.BytesIO(), "PNG")
    return called - begun, time.perf_counter() - called


def alone(pipeline: Any, seed: int, call: dict[str, Any]) -> Any:
    import torch

    (image,) = pipeline.base([PROMPT], generator=[torch.Generator().manual_seed(seed)], **call).images
    return image


def decibels(pipeline: Any, call: dict[str, Any], files: dict[int, bytes]) -> list[float]:
    """How far the first and the last image are from those of the pipeline's own call: PSNR; equal bytes have 99."""
    import numpy as np
    import PIL.Image

    found = []
    for seed in {min(files), max(files)}:
        drawn = np.asarray(PIL.Image.open(io.BytesIO(files[seed])), np.float64)
        error = ((drawn - np.asarray(alone(pipeline, seed, call), np.float64)) ** 2).mean()
        found.append(round(float(10 * np.log10(255**2 / error)), 1) if error else 99.0)
    return found


def drawn(pipeline: Any, images: int, call: dict[str, Any], seconds: dict[int, float]) -> dict[str, Any]:
    """So many images at once, in the engine."""
    from sdflow.runtime.sessions.bound import Bound
    from sdflow.serve.engine.elsewhere import OneAhead
    from sdflow.serve.engine.engine import Engine
    from sdflow.serve.jobs import Drawn, Failed, Job, Stepped, Turned

    said: list[Any] = []
    engine = Engine(lambda job: pipeline, {"it": seconds}, said.append)
    for number in range(images):
        engine.submit(Job("a", number, "it", PROMPT, number, arguments=call))
    with timed() as spent:
        spent.of(Bound, "run")
        spent.of(OneAhead, "queued")
        begun = clock()
        turns = list[dict[str, float]]()
        while engine.busy:
            said_before, before, turned = len(said), dict(spent.seconds), clock()
            engine.turn()
            whole = clock() - turned
            if all(isinstance(each, Turned | Stepped) for each in said[said_before:]) and len(said) > said_before + 1:
                parts = {name: value - before.get(name, 0.0) for name, value in spent.seconds.items()}
                turns.append({"whole": whole, **parts, "left": whole - sum(parts.values())})
        wall = clock() - begun
    for failed in said:
        if isinstance(failed, Failed):
            raise SystemExit(failed.what)
    batches = [batch for each in said if isinstance(each, Turned) for batch in each.batches]
    stages = [each.seconds for each in said if isinstance(each, Drawn)]
    return {
        "files": {each.index: each.file for each in said if isinstance(each, Drawn)},
        "wall": wall,
        "turns": len(batches),
        "sizes": {size: sum(batch[1] == size for batch in batches) for size in sorted({batch[1] for batch in batches})},
        "turn": {name: statistics.median(turn.get(name, 0.0) for turn in turns) for name in turns[0]} if turns else {},
        "stages": {name: statistics.median(each[name] for each in stages) for name in stages[0]},
    }


class Spent:
    """Seconds in functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.replaced: list[tuple[type, str, Callable[..., Any]]] = []

    def of(self, cls: type, name: str) -> None:
        own = getattr(cls, name)

        def run(*given: Any, **more: Any) -> Any:
            begun = clock()
            try:
                return own(*given, **more)
            finally:
                self.seconds[name] += clock() - begun

        self.replaced.append((cls, name, own))
        setattr(cls, name, run)


@contextmanager
def timed() -> Iterator[Spent]:
    spent = Spent()
    try:
        yield spent
    finally:
        for cls, name, own in spent.replaced:
            setattr(cls, name, own)


if __name__ == "__main__":
    main()
