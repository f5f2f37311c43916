"""Compare images of a pipeline whose weights do not fit on the device together with the same images when all weights
fit.

    python benchmarks/gpu/weights_in_turns.py PIPELINE --gb 10 [--size 1024] [--steps 4] [--guidance 0] [--images 3] [--json FILE]

PIPELINE: with weights (benchmarks/gpu/with_weights.py). Each variant runs in a separate process. In the second, memory
is reserved so that only --gb of the device are free at its start, including CUDA's context: the device itself sets the
limit. The latents of both must be bit-identical. Submodels that do not fit by themselves are streamed; what is printed
includes the time of these copies alone. The image may differ if the VAE is tiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def copied_per_second() -> float:
    """Bytes, from page-locked memory of the host to the device."""
    import torch

    host, device = (
        torch.empty(1 << 30, dtype=torch.uint8).pin_memory(),
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    )
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, host.nbytes / (time.perf_counter() - begun))
    return best


def streamed(pipeline: Any) -> dict[str, Any]:
    """Submodel -> what its plan says, and the bytes of values that ONNX Runtime let no operator pass in place."""
    import ctypes

    from sdflow.runtime.kernels.library import operator_library

    plans = {name: each.weights.plan for name, each in pipeline.submodels.items() if each.weights is not None}
    found: dict[str, Any] = {
        name: {
            "resident": plan.resident,
            "streamed": plan.size,
            "per_run": plan.per_run,
            "weights": len(plan.streamed),
            "buffer": plan.buffers.size,
        }
        for name, plan in plans.items()
        if plan is not None
    }
    if found:
        moved = ctypes.CDLL(str(operator_library())).sdflow_moved_bytes
        moved.restype = ctypes.c_int64
        found["moved_bytes"] = moved()
    return found


def child(options: argparse.Namespace, latents: Path) -> None:
    import numpy as np
    import torch

    from sdflow.runtime.pipeline import Pipeline

    torch.cuda.init()
    speed = copied_per_second() if options.child == "fit" else None
    torch.cuda.empty_cache()
    at_first = torch.cuda.mem_get_info()[0]
    held = None
    if options.child == "fit":
        held = torch.empty(at_first - int(options.gb * 1e9), dtype=torch.uint8, device="cuda")
    begun, least = time.perf_counter(), [at_first]
    pipeline = Pipeline.load(options.pipeline, "cuda", keep=options.child, checker=False)
    loaded, seconds, parts, drawn = time.perf_counter() - begun, [], [], None

    def passed(since: float) -> float:
        torch.cuda.synchronize()
        return time.perf_counter() - since

    for number in range(options.images + 1):
        begun = time.perf_counter()
        with pipeline.place.current():
            drawing = pipeline.drawing(
                f"a red fox in the snow, number {number}",
                height=options.size,
                width=options.size,
                num_inference_steps=options.steps,
                guidance_scale=options.guidance,
                generator=torch.Generator().manual_seed(0),
            )
            least.append(torch.cuda.mem_get_info()[0])
            text = passed(begun)
            drawing.run(lambda *_: least.append(torch.cuda.mem_get_info()[0]))
            drawn = drawing.latents().float().cpu().numpy()
            steps = passed(begun)
            made = drawing.finish("np").images
            least.append(torch.cuda.mem_get_info()[0])
        seconds.append(passed(begun))
        parts.append({"text_s": text, "steps_s": steps - text, "decode_s": seconds[-1] - steps})
    np.savez(latents, latents=drawn, image=made)
    most = at_first - min(least) - (0 if held is None else held.nbytes)
    found = {"load_s": loaded, "first_s": seconds[0], "image_s": min(seconds[1:]), "bytes": most, "parts": parts[-1]}
    if speed is not None:
        found |= {"copied_per_second": speed, "streams": streamed(pipeline)}
    print(json.dumps(found))


def bound(found: dict[str, Any], steps: int) -> None:
    """Print how long the copies of the streamed weights alone take."""
    speed = found["fit"]["copied_per_second"]
    print(f"copies from the host: {speed / 1e9:.1f} GB/s")
    for name, each in found["fit"]["streams"].items():
        if name == "moved_bytes":
            print(f"values moved because they were not passed in place: {each} bytes (expected: 0)")
            continue
        print(
            f"{name}: {each['resident'] / 1e9:.2f} GB stay, {each['streamed'] / 1e9:.2f} GB are streamed, "
            f"{each['per_run'] / 1e9:.2f} GB of them in every run: {each['per_run'] / speed * 1000:.0f} ms"
        )
    for way in ("all", "fit"):
        print(
            f"{way}: {found[way]['parts']['steps_s'] / steps * 1000:.1f} ms a step, {found[way]['bytes'] / 1e9:.2f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--gb", type=float, required=True)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=0.0)
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("all", "fit"), help=argparse.SUPPRESS)
    parser.add_argument("--latents", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options, options.latents)
        return
    import numpy as np

    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for way in ("all", "fit"):
            command = [sys.executable, *sys.argv, "--child", way, "--latents", f"{scratch}/{way}.npz"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(f"{way}: status {done.returncode}")
                continue
            found[way] = json.loads(done.stdout.splitlines()[-1])
            print(way, found[way], flush=True)
        if len(found) == 2:
            a, b = (np.load(f"{scratch}/{way}.npz") for way in ("all", "fit"))
            found["same"] = {name: bool(np.array_equal(a[name], b[name])) for name in a.files}
            found["distance"] = {name: float(np.abs(a[name] - b[name]).max()) for name in a.files}
            found["ratio"] = {"image": found["fit"]["image_s"] / found["all"]["image_s"]}
            found["ratio"]["steps"] = found["fit"]["parts"]["steps_s"] / found["all"]["parts"]["steps_s"]
            bound(found, options.steps)
            print(found["same"], found["distance"], found["ratio"])
    if options.json:
        options.json.write_text(json.dumps({**vars(options), **found}, default=str, indent=1))


if __name__ == "__main__":
    main()
