"""Compare images of a pipeline whose weights do not fit on the device together with the same images when all weights
fit.

    python benchmarks/gpu/weights_in_turns.py PIPELINE --gb 15 7.5 [--size 1024] [--steps 4] [--guidance 0] [--images 3]
        [--json FILE]

PIPELINE: with weights (benchmarks/gpu/with_weights.py). The images with all weights, and those of each limit, are drawn
by processes of their own. For a limit, memory is reserved so that only that many GB of the device are free once CUDA's
context exists: the device itself sets the limit. The latents must be bit-identical to those with all weights.
Submodels that do not fit by themselves are streamed; what is printed says how long these copies take alone, what a step
computes, and what of the copies it does not hide (benchmarks/gpu/stream_times.py). The image may differ if the VAE is
tiled. The processes import while the first one draws, and all say on stderr what the device's memory holds before and
after each part of an image, and when one fails. The exit status is 1 if a process failed or latents differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from stream_times import Watch, copied_per_second, memories, report, steady, streamed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


GO = "go\n"
ALL = "all"
"""What the way is called that has all weights on the device, as `keep` does."""
INFINITE = float("inf")
"""Its limit, in GB."""


class Memory:
    """Says what the device's memory holds. held: bytes reserved by the benchmark. pipeline: once it is loaded."""

    def __init__(self, at_first: int, held: int) -> None:
        self.at_first, self.held, self.least = at_first, held, at_first
        self.pipeline: Any = None
        self._begun = time.perf_counter()

    def tell(self, stage: str) -> None:
        """Print a line, and count the smallest free memory so far."""
        import torch

        free = torch.cuda.mem_get_info()[0]
        self.least = min(self.least, free)
        submodels = {} if self.pipeline is None else self.pipeline.submodels
        weights = {
            name: each.weights.resident.weights.size - each.weights.resident.weights.missing
            for name, each in submodels.items()
            if each.weights is not None and each.weights.resident is not None
        }
        by_torch = torch.cuda.memory_reserved() - self.held
        others = self.at_first - self.held - free - sum(weights.values()) - by_torch
        parts = {**weights, "torch (with stream buffers)": by_torch, "arenas and libraries": others}
        held = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
        seconds = time.perf_counter() - self._begun
        print(f"memory {seconds:6.2f} s {stage}: {free / 1e9:.2f} GB free; {held}", file=sys.stderr, flush=True)


def child(options: argparse.Namespace, latents: Path) -> None:
    import torch  # before ONNX Runtime, as in the package

    from sdflow.runtime.files.folder import load_companions
    from sdflow.runtime.pipeline import Pipeline  # noqa: F401

    load_companions(options.pipeline)  # imports transformers and diffusers
    if sys.stdin.readline() != GO:  # the other process has ended
        return
    torch.cuda.init()
    limited = options.child != INFINITE
    speed = copied_per_second() if limited else None
    torch.cuda.empty_cache()
    at_first = torch.cuda.mem_get_info()[0]
    held = None
    if limited:
        held = torch.empty(at_first - int(options.child * 1e9), dtype=torch.uint8, device="cuda")
    memory = Memory(at_first, 0 if held is None else torch.cuda.memory_reserved())
    memory.tell("start")
    try:
        found = drawn(options, latents, memory)
    except BaseException:
        memory.tell("failure")
        raise
    if speed is not None:
        found |= {"copied_per_second": speed, "streams": streamed(memory.pipeline)}
        try:
            found["memories"] = memories(memory.pipeline)
        except RuntimeError:  # CUDA's; the images' times are worth keeping
            traceback.print_exc()
            found["memories"] = {}
    print(json.dumps(found))


def drawn(options: argparse.Namespace, latents: Path, memory: Memory) -> dict[str, Any]:
    """Draw the images, and return the times."""
    import numpy as np
    import torch

    from sdflow.runtime.pipeline import Pipeline

    begun = time.perf_counter()
    keep = ALL if options.child == INFINITE else "fit"
    pipeline = memory.pipeline = Pipeline.load(options.pipeline, "cuda", keep=keep, checker=False)
    loaded, seconds, parts, last = time.perf_counter() - begun, [], [], None

    def passed(since: float) -> float:
        torch.cuda.synchronize()
        return time.perf_counter() - since

    step_ms: list[float] = []
    for number in range(options.images + 1):
        memory.tell(f"image {number}: before the text")
        begun = time.perf_counter()
        with pipeline.place.current(), nullcontext() if number else Watch() as watch:
            drawing = pipeline.drawing(
                f"a red fox in the snow, number {number}",
                height=options.size,
                width=options.size,
                num_inference_steps=options.steps,
                guidance_scale=options.guidance,
                generator=torch.Generator().manual_seed(0),
            )
            text = passed(begun)
            memory.tell(f"image {number}: after the text")
            events = [torch.cuda.Event(enable_timing=True) for _ in range(drawing.runs + 1)]
            events[0].record()
            drawing.run(lambda index, *_, events=events: events[index + 1].record())
            last = drawing.latents().float().cpu().numpy()
            steps = passed(begun)
            memory.tell(f"image {number}: after {len(events) - 1} steps")
            made = drawing.finish("np").images
        seconds.append(passed(begun))
        parts.append({"text_s": text, "steps_s": steps - text, "decode_s": seconds[-1] - steps})
        memory.tell(f"image {number}: decoded")
        step_ms = [one.elapsed_time(next_) for one, next_ in pairwise(events)]
        if watch is not None and watch.least >= 0:
            memory.least = min(memory.least, watch.least)
            print(f"memory: at least {watch.least / 1e9:.2f} GB were free during the first image", file=sys.stderr)
    np.savez(latents, latents=last, image=made)
    most = memory.at_first - memory.least - memory.held
    return {
        "load_s": loaded,
        "first_s": seconds[0],
        "image_s": min(seconds[1:]),
        "bytes": most,
        "parts": parts[-1],
        "step_ms": step_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--gb", type=float, nargs="+", required=True)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=0.0)
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--latents", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options, options.latents)
        return
    found = compared(options)
    if options.json:
        options.json.write_text(json.dumps({**vars(options), **found}, default=str, indent=1))
    same = [each["same"]["latents"] for each in found.values() if "same" in each]
    sys.exit(len(same) < len(options.gb) or not all(same))


def compared(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What was found with all weights, `all`, and with each limit, and how they compare."""
    import numpy as np

    ways = {ALL: INFINITE, **{f"{gb:g} GB": gb for gb in options.gb}}
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        children = {
            way: subprocess.Popen(
                [sys.executable, *sys.argv, "--latents", f"{scratch}/{way}.npz", "--child", str(gb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for way, gb in ways.items()
        }
        for way, process in children.items():
            said, _ = process.communicate(GO)
            if process.returncode:
                print(f"{way}: status {process.returncode}", flush=True)
                continue
            found[way] = json.loads(said.splitlines()[-1])
            print(way, found[way], flush=True)
        for way, each in found.items():
            if way == ALL or ALL not in found:
                continue
            a, b = (np.load(f"{scratch}/{name}.npz") for name in (ALL, way))
            each["same"] = {name: bool(np.array_equal(a[name], b[name])) for name in a.files}
            each["distance"] = {name: float(np.abs(a[name] - b[name]).max()) for name in a.files}
            each["ratio"] = {"image": each["image_s"] / found[ALL]["image_s"]}
            each["ratio"]["steps"] = each["parts"]["steps_s"] / found[ALL]["parts"]["steps_s"]
            print(f"\n{way} of the device:")
            report(found[ALL], each)
            print(each["same"], each["distance"], each["ratio"])
    print(f"\n{options.pipeline.name}, {options.steps} steps: way, most memory in GB, a step and an image in ms")
    for way, each in found.items():
        told = f"  {way:8} {each['bytes'] / 1e9:6.2f} {steady(each):8.1f} {1000 * each['image_s']:8.0f}"
        if "same" in each:
            told += (
                f"; {each['ratio']['step']:.2f} and {each['ratio']['image']:.2f} of all weights, latents "
                f"{'the same' if each['same']['latents'] else 'DIFFER'}, image {each['distance']['image']:.5f} apart"
            )
        print(told, flush=True)
    return found


if __name__ == "__main__":
    main()
