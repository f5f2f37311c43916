"""Compare images of a pipeline whose weights do not fit on the device together with the same images when all weights
fit.

    python benchmarks/gpu/weights_in_turns.py PIPELINE --gb 10 [--size 1024] [--steps 4] [--guidance 0] [--images 3] [--json FILE]

PIPELINE: with weights (benchmarks/gpu/with_weights.py). Each variant runs in a separate process. In the second, memory
is reserved so that only --gb of the device are free at its start, including CUDA's context: the device itself sets the
limit. The latents of both must be bit-identical.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def child(options: argparse.Namespace, latents: Path) -> None:
    import numpy as np
    import torch

    from sdflow.runtime.pipeline import Pipeline

    torch.cuda.init()
    at_first = torch.cuda.mem_get_info()[0]
    held = None
    if options.child == "fit":
        held = torch.empty(at_first - int(options.gb * 1e9), dtype=torch.uint8, device="cuda")
    begun, least = time.perf_counter(), [at_first]
    pipeline = Pipeline.load(options.pipeline, "cuda", keep=options.child, checker=False)
    loaded, seconds, drawn = time.perf_counter() - begun, [], None
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
            drawing.run(lambda *_: least.append(torch.cuda.mem_get_info()[0]))
            drawn = drawing.latents().float().cpu().numpy()
            made = drawing.finish("np").images
            least.append(torch.cuda.mem_get_info()[0])
        seconds.append(time.perf_counter() - begun)
    np.savez(latents, latents=drawn, image=made)
    most = at_first - min(least) - (0 if held is None else held.nbytes)
    print(json.dumps({"load_s": loaded, "first_s": seconds[0], "image_s": min(seconds[1:]), "bytes": most}))


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
            found["ratio"] = {"image": found["fit"]["image_s"] / found["all"]["image_s"]}
            print(found["same"], found["ratio"])
    if options.json:
        options.json.write_text(json.dumps({**vars(options), **found}, default=str, indent=1))


if __name__ == "__main__":
    main()
