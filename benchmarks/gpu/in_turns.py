"""Compare sdflow, its approximations and torch.compile in turns in one process: times, memory, distances.

    python benchmarks/gpu/in_turns.py GRAPHS NAME --draw '{"num_inference_steps": 30}' ... [--near '{"reuse": {"every": 2}}' ...]
        [--beside NAME ...] [--parts] [--weights DIR] [--rounds 5] [--turn FILE --of 2] [--compile-only] [--out JSON]
        [--device cpu]

GRAPHS, NAME, the JSON of --draw, --weights: as in benchmarks/gpu/pipelines_on_gpu.py, with "images": 8 for a batch.
--near: arguments for an approximation; each runs for the first --draw and is compared with sdflow's exact image of the
same latents. --beside: another pipeline of the same checkpoint, such as a quantized one; it runs each --draw and is
compared with the first one's images. --parts: also time the step and the decoder alone, many in a row, for the first
--draw. --turn, --of: as in benchmarks/gpu/pipelines_beside_torch.py, whose torch.compile setup this uses: UNet and
decoder in half precision, reduce-overhead, with fused query, key and value. A second process reuses torch's
compilations from $TORCHINDUCTOR_CACHE_DIR; --compile-only does nothing else. Memory is the driver's figure for this
process: sdflow's after its first image, PyTorch's by its allocator's growth. Use `--device cpu` to try it in float32,
not compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.gpu.pipelines_beside_torch import Turn, cloned, load, prepare
from benchmarks.gpu.pipelines_beside_torch import draw as draw_torch
from benchmarks.gpu.pipelines_on_gpu import PROMPT, bound_pipeline, distance, given_to, own_gigabytes, say, synchronize
from benchmarks.gpu.pipelines_on_gpu import draw as draw_ours

IN_A_ROW = 10
"""Runs of a part for one measurement."""
KEPT = 8
"""Denoisers that stay loaded: one for each call and approximation."""


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
    from sdflow.runtime.denoiser import denoisers
    from sdflow.runtime.pipeline import Pipeline

    denoisers.KEPT = KEPT
    begun = time.perf_counter()
    runs: list[tuple[str, str, Callable[[], Any]]] = []
    pipelines: dict[str, Any] = {}
    found: dict[str, Any] = {"name": options.name, "distances": {}, "memory_gb": {}}

    def add(call: str, engine: str, run: Callable[[], Any]) -> None:
        runs.append((call, engine, run))

    def compare(what: str, drawn: Any, right: Any) -> None:
        found["distances"][what] = apart = {"relative_l2": distance(drawn, right), "psnr": psnr(drawn, right)}
        say(f"  {what}: {apart['relative_l2']:.4f} relative L2, {apart['psnr']:.1f} dB to sdflow's exact image")

    with ExitStack() as folders:
        folder = folders.enter_context(bound_pipeline(options.name, options))
        theirs = load(options.graphs / options.name, "cpu")
        say(f"{options.name}: weights there after {time.perf_counter() - begun:.0f} s")
        with turn.alone():
            if options.device == "cuda":
                torch.zeros(1, device="cuda")
            before = own_gigabytes()
            ours = pipelines["sdflow"] = Pipeline.load(folder, options.device, checker=False)
            calls = [given_to(ours, each) for each in options.draw]
            exact = [draw_ours(ours, calls[0])]
            found["memory_gb"]["sdflow"] = own_gigabytes() - before
            say(f"  sdflow: first image, {found['memory_gb']['sdflow']:.2f} GB beside a context's {before:.2f}")
            exact += [draw_ours(ours, given) for given in calls[1:]]
            for given in calls:
                add(given["call"], "sdflow", partial(draw_ours, ours, given))
            for near in options.near:
                given = with_call(calls[0], near)
                compare(json.dumps(near), draw_ours(ours, given), exact[0])
                add(calls[0]["call"], json.dumps(near), partial(draw_ours, ours, given))
            for name in options.beside:
                place = folders.enter_context(bound_pipeline(name, options))
                other = pipelines[name] = Pipeline.load(place, options.device, checker=False)
                for given, right in zip(calls, exact, strict=True):
                    compare(f"{name}, {given['call']}", draw_ours(other, given), right)
                    add(given["call"], name, partial(draw_ours, other, given))
            found["before_torch_ms"] = in_turns(runs, 1)
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
        compare(f"torch, {given['call']}", drawn, right)
        say(f"  torch, {given['call']}: ready after {time.perf_counter() - begun:.0f} s")
        add(given["call"], "torch", partial(draw_torch, theirs, given))
    turn.wait_for_all()
    with turn.alone():
        found["ms"] = in_turns(runs, options.rounds)
        if options.parts:
            found["parts_ms"] = in_turns(parts(pipelines, theirs, calls[0]), options.rounds, IN_A_ROW)
    return found


def compile_only(options: argparse.Namespace) -> None:
    """Leaves what torch compiles for these calls in its cache."""
    theirs = load(options.graphs / options.name, "cpu")
    theirs.to(options.device)
    prepare(theirs, argparse.Namespace(device=options.device, compile=options.device == "cuda"))
    config, scale = theirs.unet.config, theirs.vae_scale_factor
    nothing = {"scale": 0.0, "control": (), "shown": ()}
    for each in options.draw:
        begun, more = time.perf_counter(), dict(each)
        images, size = more.pop("images", 1), more.pop("size", config.sample_size * scale)
        call = {**more, "height": size, "width": size, "num_images_per_prompt": images, "num_inference_steps": 2}
        latents = torch.randn(images, config.in_channels, size // scale, size // scale).numpy()
        draw_torch(theirs, {**nothing, "latents": latents, "call": json.dumps(call)})
        say(f"{options.name}, {json.dumps(each)}: compiled in {time.perf_counter() - begun:.0f} s")


def parts(pipelines: dict[str, Any], theirs: Any, given: dict[str, Any]) -> list[tuple[str, str, Callable[[], Any]]]:
    """A step with guidance and the decoder, of each as its pipeline itself runs them. pipelines: sdflow's, by name."""
    seen: dict[str, Callable[[], Any]] = {}

    def note(module: Any, method: str, what: str) -> None:
        """The module's next call with what it is given, to be repeated."""
        run = getattr(module, method)

        def call(*arguments: Any, **named: Any) -> Any:
            kept, kept_named = cloned(arguments), cloned(named)
            seen[what] = lambda: run(*kept, **kept_named)
            return run(*arguments, **named)

        setattr(module, method, call)

    note(theirs.unet, "forward", "step")
    note(theirs.vae, "decode", "decoder")
    draw_torch(theirs, given)
    runs = [(what, "torch", run) for what, run in seen.items()]

    def here(pipeline: Any, run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            with pipeline.place.current():
                run()

        return call

    for name, each in pipelines.items():
        draw_ours(each, given)
        drawing = each.drawing(PROMPT, latents=torch.from_numpy(given["latents"]), **json.loads(given["call"]))
        noise = drawing.latents()
        decoder = each.submodels[each.family.decoder].bound(latent_sample=(1, *noise.shape[1:]))
        step = partial(drawing.denoiser.run, drawing.inputs, noise, 1)
        runs += [("step", name, here(each, step)), ("decoder", name, here(each, decoder.run))]
    return runs


def in_turns(
    runs: list[tuple[str, str, Callable[[], Any]]], rounds: int, in_a_row: int = 1
) -> dict[str, dict[str, Any]]:
    """Call -> engine -> milliseconds of each round; the next round begins with the next engine."""
    times: dict[str, dict[str, Any]] = {call: {} for call, _, _ in runs}
    for _, _, run in runs:
        run()
    for index in range(rounds):
        shift = index % len(runs)
        for call, engine, run in (*runs[shift:], *runs[:shift]):
            again = partial(repeat, run, in_a_row)
            times[call].setdefault(engine, []).append(took(again) / in_a_row)
    for call, engines in times.items():
        medians = {engine: statistics.median(each) for engine, each in engines.items()}
        for engine, median in sorted(medians.items(), key=lambda each: each[1]):
            others = [f"{median / medians[other]:.3f} of {other}" for other in ("torch", "sdflow") if other in medians]
            between = f"({min(engines[engine]):.2f} to {max(engines[engine]):.2f})"
            say(f"{median:9.2f} ms {between}, {', '.join(others)}: {engine}, {call}")
    return times


def repeat(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("name")
    parser.add_argument("--draw", action="append", type=json.loads, required=True)
    parser.add_argument("--near", action="append", type=json.loads, default=[])
    parser.add_argument("--beside", action="append", default=[], metavar="NAME")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.compile_only:
        with torch.no_grad():
            compile_only(options)
        return
    with tempfile.TemporaryDirectory(prefix="turns-") as flags, torch.no_grad():
        found = measure(options, Turn(options.turn or Path(flags) / options.name, options.of))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
