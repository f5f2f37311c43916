"""Compare the sample pipeline on the CPU with eager PyTorch, in turns in one process.

    sdflow run workflows/shapes_cpu.yaml --no-evaluate
    python benchmarks/cpu/sample_on_cpu.py pipelines/shapes_cpu [--threads 2] [--rounds 5] [--waiting spin --waiting stop ...]

Prints wall and processor time of images with 1 and 9 runs of the UNet, the ratio for 20, and the largest difference
between the images. On a busy machine compare processor time with one thread, because waiting threads spin. --waiting:
repeat sdflow with this behavior of ONNX Runtime's idle threads: "spin", "stop" spinning when a run ends, or "sleep".
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from sdflow.runtime.pipeline import Pipeline
from sdflow.runtime.sessions.tuning import Tuning

SAMPLE = Path(__file__).parents[2] / "samples/shapes"
PROMPT = "a large red circle on a blue background"
FEW, MANY, IMAGE = 1, 9, 20

WAITING = {
    "spin": {"session.intra_op.allow_spinning": "1", "session.force_spinning_stop": "0"},
    "stop": {"session.intra_op.allow_spinning": "1", "session.force_spinning_stop": "1"},
    "sleep": {"session.intra_op.allow_spinning": "0"},
}


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waiting", action="append", default=[], choices=WAITING)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ours = Pipeline.load(options.pipeline, "cpu", threads=options.threads)
    theirs: Any = diffusers.StableDiffusionPipeline.from_pretrained(SAMPLE, torch_dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    latents = torch.randn(ours.latents_shape(1, None, None), generator=torch.Generator().manual_seed(0))
    others = {
        f"sdflow {how}": Pipeline.load(
            options.pipeline, "cpu", threads=options.threads, tuning=Tuning(session=WAITING[how])
        )
        for how in options.waiting
    }
    engines = {"sdflow": ours, **others, "eager": theirs}

    def draw(engine: Any, steps: int) -> Any:
        settings = {"guidance_scale": 7.5, "num_inference_steps": steps, "output_type": "np"}
        return engine(PROMPT, latents=latents, **settings).images

    images = {name: draw(engine, IMAGE) for name, engine in engines.items()}
    print(f"largest difference after {IMAGE} steps: {abs(images['sdflow'] - images['eager']).max():.1e}")
    best = {(name, steps): (float("inf"), float("inf")) for name in engines for steps in (FEW, MANY)}
    for _ in range(options.rounds):
        for (name, steps), known in best.items():
            taken = seconds(lambda name=name, steps=steps: draw(engines[name], steps))  # type: ignore[misc]
            best[name, steps] = (min(known[0], taken[0]), min(known[1], taken[1]))
    for index, kind in enumerate(("wall", "processor")):
        whole = {}
        for name in engines:
            few, many = best[name, FEW][index], best[name, MANY][index]
            step = (many - few) / (MANY - FEW)
            whole[name] = few + (IMAGE - FEW) * step
            print(f"{kind:9} {name:12} a step {1e3 * step:6.1f} ms, the rest {1e3 * (few - step):6.1f} ms")
        for name in ("sdflow", *others):
            ratio = whole["eager"] / whole[name]
            print(
                f"{kind:9} {IMAGE} steps: {name} {whole[name]:.2f} s, eager {whole['eager']:.2f} s, {ratio:.2f} times as fast"
            )


if __name__ == "__main__":
    main()
