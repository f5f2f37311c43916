"""Time a process from its start to its first image: with no kernels in the cache, then with those that an earlier process left.

    python benchmarks/gpu/first_image.py PIPELINE [--processes 3] [--steps 50] [--size N] [--target cuda] [--profile]
        [--json FILE]

PIPELINE: with weights (of benchmarks/gpu/with_weights.py, or built). The first process finds an empty $SDFLOW_KERNELS, so it
compiles and proves sdflow's kernels. Each process prints seconds since it started, after its imports, after loading, and
after its first and second images; the second image is the time of a warm one. --profile: a further process, slower than the
others, tells which packages' imports and which functions of its main thread take the time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

BEGUN = "FIRST_IMAGE_BEGUN"
"""Variable with the time at which a process was started."""
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w]+)")
"""A line of `python -X importtime`: microseconds of a module without what it imports."""
TOLD = 25
"""Functions, and half as many packages, that a profile tells."""


def child(options: argparse.Namespace) -> None:
    begun = float(os.environ[BEGUN])
    found: dict[str, float] = {}

    def note(what: str) -> None:
        found[what] = round(time.time() - begun, 2)

    import torch  # before ONNX Runtime

    from sdflow.machine.diffusers_alone import import_diffusers_alone
    from sdflow.runtime.pipeline import Pipeline

    import_diffusers_alone()  # as `sdflow generate` does
    note("imported")
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    pipeline = Pipeline.load(options.pipeline, options.target, checker=False)
    note("loaded")
    size = {} if options.size is None else {"height": options.size, "width": options.size}
    for which in ("first image", "second image"):
        generator = torch.Generator().manual_seed(0)
        pipeline("a red fox in the snow", num_inference_steps=options.steps, generator=generator, **size)
        note(which)
        profile.disable()
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(TOLD)
    print(json.dumps(found))


def run(kernels: str, *, profile: bool = False) -> dict[str, float]:
    """What a process says. profile: print where its time goes, too."""
    arguments = [each for each in sys.argv if profile or each != "--profile"]
    done = subprocess.run(
        [sys.executable, *(["-X", "importtime"] if profile else []), *arguments, "--child"],
        env={**os.environ, "SDFLOW_KERNELS": kernels, "CUDA_CACHE_PATH": kernels, BEGUN: repr(time.time())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if profile else None,
        text=True,
        check=True,
    )
    if profile:
        packages = Counter[str]()
        for microseconds, package in IMPORTED.findall(done.stderr):
            packages[package] += int(microseconds)
        for package, spent in packages.most_common(TOLD // 2):
            print(f"  {spent / 1e6:6.2f} s of imports: {package}")
        print(*(f"  {line}" for line in done.stdout.splitlines()[:-1] if line.strip()), sep="\n", flush=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", type=int)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    found = []
    with tempfile.TemporaryDirectory() as kernels:
        for number in range(options.processes):
            found.append(run(kernels))
            print(f"{'kept kernels' if number else 'no kernels'}: {found[-1]}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
        if options.profile:
            print(f"profiled: {run(kernels, profile=True)}", flush=True)


if __name__ == "__main__":
    main()
