"""Time a process from its start to its first image: with no kernels in the cache, then with those that an earlier process left.

    python benchmarks/gpu/first_image.py PIPELINE [--processes 3] [--steps 50] [--size N] [--target cuda] [--json FILE]

PIPELINE: with weights (of benchmarks/gpu/with_weights.py, or built). The first process finds an empty $SDFLOW_KERNELS, so it
compiles and proves sdflow's kernels. Each process prints seconds since it started, after its imports, after loading, and
after its first and second images; the second image is the time of a warm one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def child(options: argparse.Namespace) -> None:
    import time

    import psutil

    begun = psutil.Process().create_time()
    found: dict[str, float] = {}

    def note(what: str) -> None:
        found[what] = round(time.time() - begun, 2)

    import torch  # before ONNX Runtime

    from sdflow.runtime.pipeline import Pipeline

    note("imported")
    pipeline = Pipeline.load(options.pipeline, options.target, checker=False)
    note("loaded")
    size = {} if options.size is None else {"height": options.size, "width": options.size}
    for which in ("first image", "second image"):
        generator = torch.Generator().manual_seed(0)
        pipeline("a red fox in the snow", num_inference_steps=options.steps, generator=generator, **size)
        note(which)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", type=int)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    found = []
    with tempfile.TemporaryDirectory() as kernels:
        for number in range(options.processes):
            done = subprocess.run(
                [sys.executable, *sys.argv, "--child"],
                env={**os.environ, "SDFLOW_KERNELS": kernels},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{'kept kernels' if number else 'no kernels'}: {found[-1]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
