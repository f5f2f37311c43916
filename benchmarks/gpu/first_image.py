"""Time a process from its start to its first image: with no kernels in the cache, then with those that an earlier process left.

    python benchmarks/gpu/first_image.py PIPELINE [--processes 3] [--steps 50] [--size N] [--target cuda]
        [--command [--unchecked]] [--imports] [--timeline] [--kernels DIR] [--json FILE]

PIPELINE: with weights (of benchmarks/gpu/with_weights.py, or built). The first process finds an empty $SDFLOW_KERNELS, so it
compiles and proves sdflow's kernels. Each process prints seconds since it started, after its imports, after loading, and
after its first and second images, and the second one's digest: whether cuDNN chose the same algorithms in all of them.
The second image is the time of a warm one. --command: twice
`sdflow generate PIPELINE`, from its start to the file and to its end, with the safety checker and without.
--unchecked: with --no-check, which the output of with_weights.py needs. --imports: a further process, slower than the others,
tells which packages' imports take the time. --timeline: what the last process did, and when. --kernels: $SDFLOW_KERNELS of
all processes, which may hold kernels of an earlier run. --json: everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.spans import Spans

BEGUN = "FIRST_IMAGE_BEGUN"
"""Variable with the time at which a process was started."""
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w]+)")
"""A line of `python -X importtime`: microseconds of a module without what it imports."""
PACKAGES = 10
SHORTEST = 0.03
"""Seconds of the shortest span that is printed."""
PROMPT = "a red fox in the snow"


def child(options: argparse.Namespace) -> None:
    begun = float(os.environ[BEGUN])
    found: dict[str, float] = {}
    processor: dict[str, float] = {}

    def note(what: str) -> None:
        found[what] = round(time.time() - begun, 2)
        processor[what] = round(time.process_time(), 2)

    note("started")
    import torch  # before ONNX Runtime

    note("torch")
    from sdflow.runtime.files.folder import import_companions
    from sdflow.runtime.pipeline import Pipeline

    import_companions(options.pipeline)  # as `sdflow generate` does
    note("imported")
    spans = Spans(begun)
    spans.watch()
    size = {} if options.size is None else {"height": options.size, "width": options.size}
    pipeline = Pipeline.load(options.pipeline, options.target, checker=False, first=size)
    note("loaded")
    for which in ("first image", "second image"):
        generator = torch.Generator().manual_seed(0)
        (image,) = pipeline(PROMPT, num_inference_steps=options.steps, generator=generator, **size).images
        note(which)
        digest = hashlib.sha256(image.tobytes()).hexdigest()[:12]
    print(json.dumps({"wall": found, "processor": processor, "image": digest, "spans": spans.told()}))


def environment(kernels: str) -> dict[str, str]:
    return {**os.environ, "SDFLOW_KERNELS": kernels, "CUDA_CACHE_PATH": kernels, BEGUN: repr(time.time())}


def run(kernels: str, *, imports: bool = False) -> dict[str, Any]:
    """What a process says. imports: print the packages whose imports take longest, too."""
    done = subprocess.run(
        [sys.executable, *(["-X", "importtime"] if imports else []), *sys.argv, "--child"],
        env=environment(kernels),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if imports else None,
        text=True,
        check=True,
    )
    if imports:
        packages = Counter[str]()
        for microseconds, package in IMPORTED.findall(done.stderr):
            packages[package] += int(microseconds)
        longest = (f"{package} {spent / 1e6:.2f}" for package, spent in packages.most_common(PACKAGES))
        print(f"imports, s: {', '.join(longest)}; all {sum(packages.values()) / 1e6:.2f}", flush=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_command(kernels: str, options: argparse.Namespace, *more: str) -> dict[str, float]:
    """Seconds from the start of `sdflow generate` to its image, and to its end."""
    with tempfile.TemporaryDirectory() as out:
        size = [] if options.size is None else ["--height", str(options.size), "--width", str(options.size)]
        begun = time.time()
        subprocess.run(
            [
                *(sys.executable, "-m", "sdflow", "generate", str(options.pipeline), "--prompt", PROMPT, "--out", out),
                *("--target", options.target, "--steps", str(options.steps), "--seed", "0", *size, *more),
                *(["--no-check"] if options.unchecked else []),
            ],
            env=environment(kernels),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        ended = time.time()
        (image,) = Path(out).glob("*.png")
        return {"image": round(image.stat().st_mtime - begun, 2), "ended": round(ended - begun, 2)}


def print_timeline(spans: list[dict[str, Any]]) -> None:
    """Spans in order of their starts, those of other threads under the one that they began in."""
    for each in spans:
        if each["seconds"] >= SHORTEST:
            where = "  " * each["depth"] + each["what"]
            print(f"{each['start']:7.2f} {each['seconds']:6.2f} s  thread {each['thread']:2}  {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", type=int)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--command", action="store_true")
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("--imports", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    found: dict[str, list[Any]] = {"load": [], "command": []}

    def note(kind: str, measured: dict[str, Any]) -> None:
        found[kind].append(measured)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))

    with ExitStack() as stack:
        kernels = options.kernels or stack.enter_context(tempfile.TemporaryDirectory())
        for _ in range(options.processes):
            kept = any(Path(kernels).glob("*"))
            note("load", run(kernels))
            last = found["load"][-1]
            print(f"{'kept kernels' if kept else 'no kernels'}: {last['wall']}, image {last['image']}", flush=True)
        print(f"its processor time: {last['processor']}", flush=True)
        for _ in range(2 if options.command else 0):
            for more in ((), ("--no-safety-checker",)):
                note("command", run_command(kernels, options, *more))
                print(f"sdflow generate {' '.join(more)}: {found['command'][-1]}", flush=True)
        if options.imports:
            run(kernels, imports=True)
        if options.timeline:
            print_timeline(last["spans"])


if __name__ == "__main__":
    main()
