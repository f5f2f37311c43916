"""sdflow and torch.compile in one process, in turns, with sdflow's approximations between them: times, memory, distances.

    python benchmarks/in_turns.py GRAPHS NAME --draw '{"num_inference_steps": 30}' ... [--near '{"reuse": {"every": 2}}' ...]
        [--rounds 5] [--turn FILE --of 2] [--out JSON] [--device cpu]

GRAPHS, NAME, the JSON of --draw: as of benchmarks/pipelines_on_gpu.py, and "images": 8 for as many at once. --near: arguments
that make an image of sdflow's an approximation; each is drawn for the first --draw and held against sdflow's own exact image of
the same latents. --turn, --of: as of benchmarks/pipelines_beside_torch.py, whose torch.compile it is: UNet and decoder in half
precision, reduce-overhead, query, key and value fused. A second process finds what torch compiled in $TORCHINDUCTOR_CACHE_DIR.
Memory is what the driver says of this process: for sdflow when it has drawn the first image, for PyTorch what its allocator took
beyond that. `--device cpu` is to try it: float32, nothing compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from pipelines_beside_torch import Turn, load, prepare  # noqa: E402
from pipelines_beside_torch import draw as draw_torch  # noqa: E402
from pipelines_on_gpu import distance, given_to, materialize, say, synchronize  # noqa: E402
from pipelines_on_gpu import draw as draw_ours  # noqa: E402

KEPT = 8
"""Denoisers that stay loaded: one for each call and approximation."""


def own_gigabytes() -> float:
    """In use on the device by this process, as the driver says."""
    if not torch.cuda.is_available():
        return float("nan")
    synchronize()
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    found = [line.split(",") for line in lines if line.count(",") == 1]
    own = [float(used) * 2**20 / 1e9 for pid, used in found if int(pid) == os.getpid()]
    return own[0] if own else float("nan")


def took(run: Callable[[], Any]) -> float:
    """Milliseconds until it is done."""
    synchronize()
    begun = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - begun) * 1e3


def with_call(given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {**given, "call": json.dumps({**json.loads(given["call"]), **more})}


def measure(options: argparse.Namespace, turn: Turn) -> dict[str, Any]:
    from sdflow.distance import psnr
    from sdflow.runtime import denoisers
    from sdflow.runtime.pipeline import Pipeline

    denoisers.KEPT = KEPT
    begun = time.perf_counter()
    runs: list[tuple[str, str, Callable[[], Any]]] = []
    found: dict[str, Any] = {"name": options.name, "distances": {}, "memory_gb": {}}
    with tempfile.TemporaryDirectory(prefix="in-turns-") as scratch:
        folder = Path(scratch) / options.name
        materialize(options.graphs / options.name, folder)
        theirs = load(options.graphs / options.name, "cpu")
        say(f"{options.name}: weights made twice in {time.perf_counter() - begun:.0f} s")
        with turn.alone():
            if options.device == "cuda":
                torch.zeros(1, device="cuda")
            before = own_gigabytes()
            ours = Pipeline.load(folder, options.device, checker=False)
            calls = [given_to(ours, each) for each in options.draw]
            exact = [draw_ours(ours, calls[0])]
            found["memory_gb"]["sdflow"] = own_gigabytes() - before
            say(f"  sdflow: first image, {found['memory_gb']['sdflow']:.2f} GB beside a context's {before:.2f}")
            exact += [draw_ours(ours, given) for given in calls[1:]]
            for given in calls:
                runs.append((given["call"], "sdflow", lambda given=given: draw_ours(ours, given)))
            for near in options.near:
                given = with_call(calls[0], near)
                drawn = draw_ours(ours, given)
                apart = {"relative_l2": distance(drawn, exact[0]), "psnr": psnr(drawn, exact[0])}
                found["distances"][json.dumps(near)] = apart
                say(
                    f"  {json.dumps(near)}: {apart['relative_l2']:.4f} relative L2, {apart['psnr']:.1f} dB to the exact image"
                )
                runs.append((calls[0]["call"], json.dumps(near), lambda given=given: draw_ours(ours, given)))
    held = torch.cuda.memory_reserved() if options.device == "cuda" else 0
    theirs.to(options.device)
    prepare(theirs, argparse.Namespace(device=options.device, compile=options.device == "cuda"))
    for index, (given, right) in enumerate(zip(calls, exact, strict=True)):
        begun = time.perf_counter()
        for _ in range(3):
            drawn = draw_torch(theirs, given)
        if index == 0 and options.device == "cuda":
            torch.cuda.empty_cache()
            draw_torch(theirs, given)
            found["memory_gb"]["torch"] = (torch.cuda.memory_reserved() - held) / 1e9
            say(f"  torch.compile: {found['memory_gb']['torch']:.2f} GB, without what its libraries take")
        found["distances"][f"torch, {given['call']}"] = {
            "relative_l2": distance(drawn, right),
            "psnr": psnr(drawn, right),
        }
        say(f"  torch, {given['call']}: ready after {time.perf_counter() - begun:.0f} s")
        runs.append((given["call"], "torch", lambda given=given: draw_torch(theirs, given)))
    turn.wait_for_all()
    with turn.alone():
        found["ms"] = in_turns(runs, options.rounds)
    return found


def in_turns(runs: list[tuple[str, str, Callable[[], Any]]], rounds: int) -> dict[str, dict[str, Any]]:
    """Call -> engine -> milliseconds of each round; the next round begins with the next engine."""
    times: dict[str, dict[str, Any]] = {call: {} for call, _, _ in runs}
    for _, _, run in runs:
        run()
    for index in range(rounds):
        shift = index % len(runs)
        for call, engine, run in (*runs[shift:], *runs[:shift]):
            times[call].setdefault(engine, []).append(took(run))
    for call, engines in times.items():
        medians = {engine: statistics.median(each) for engine, each in engines.items()}
        for engine, median in sorted(medians.items(), key=lambda each: each[1]):
            say(
                f"{call}: {median:9.1f} ms ({min(engines[engine]):.1f} to {max(engines[engine]):.1f}), "
                f"{median / medians['torch']:.3f} of torch.compile, {median / medians['sdflow']:.3f} of sdflow: {engine}"
            )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("name")
    parser.add_argument("--draw", action="append", type=json.loads, required=True)
    parser.add_argument("--near", action="append", type=json.loads, default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turns-") as flags, torch.no_grad():
        found = measure(options, Turn(options.turn or Path(flags) / options.name, options.of))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
