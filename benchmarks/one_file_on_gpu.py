"""A pipeline as one ONNX graph on a GPU, beside the pipeline itself: image, time, and where the time goes.

    python benchmarks/one_file_on_gpu.py PIPELINE... [--steps 20] [--rounds 5] [--out FILE.json] [--target cpu]

PIPELINE: a built folder, or what benchmarks/structures.py wrote of one, whose weights are then bound here. The graph runs as a
program would run it, arrays in and out; for any size, and for the one size that it draws here (`--height`, `--width`, `--images`
of `sdflow export`). Of each a profile of one image is read: what ran on the CPU, what was copied between it and the GPU, how
much of the time the GPU had nothing to do. `--target cpu` is to try it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from pipelines_on_gpu import distance, materialize, milliseconds, say

PROMPT, NEGATIVE = "a large red circle on a blue background", ""
COPIES = ("MemcpyToHost", "MemcpyFromHost")


def session_of(graph: Path, target: str, profile: Path | None = None) -> Any:
    import onnxruntime

    from sdflow.runtime.sessions import provider_options
    from sdflow.targets import TARGETS

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    name = TARGETS[target].providers[0][0]
    made = onnxruntime.InferenceSession(
        str(graph), options, providers=[(name, provider_options(TARGETS[target], name, None))], enable_fallback=0
    )
    if made.get_providers()[0] != name:
        raise SystemExit(f"{name} could not be loaded")
    return made


def feeds_of(session: Any, pipeline: Any, told: dict[str, Any], noise: Any) -> dict[str, Any]:
    inputs = {each.name for each in session.get_inputs()}
    feeds: dict[str, Any] = {"latents": noise}
    for name in told["tokenizers"]:
        tokenizer = pipeline.companions[f"tokenizer{name.removeprefix('input_ids')}"]
        for given, text in ((name, PROMPT), (f"negative_{name}", NEGATIVE)):
            if given in inputs:
                ids = tokenizer(text, padding="max_length", truncation=True, return_tensors="np").input_ids
                feeds[given] = ids.astype(np.int32)
    if "guidance_scale" in inputs:
        feeds["guidance_scale"] = np.array([told["guidance_scale"]], np.float32)
    return feeds


def read_profile(path: Path) -> dict[str, Any]:
    """Of the last image in a profile, in milliseconds: the whole run, and the nodes of its loop by what they are. A node on the
    GPU is timed as it is queued, not as it is computed."""
    events = json.loads(path.read_text())
    run = [each for each in events if each["name"] == "model_run"][-1]
    begin, end = run["ts"], run["ts"] + run["dur"]
    nodes = [
        each
        for each in events
        if each["cat"] == "Node" and each["name"].endswith("_kernel_time") and begin <= each["ts"] < end
    ]
    kind = {id(each): each["args"].get("op_name", "") for each in nodes}
    loop = next((each for each in nodes if kind[id(each)] == "Loop"), None)
    inside = [
        each for each in nodes if loop and each is not loop and loop["ts"] <= each["ts"] < loop["ts"] + loop["dur"]
    ]

    def summed(chosen: list[Any]) -> dict[str, float]:
        return {"count": len(chosen), "ms": sum(each["dur"] for each in chosen) / 1e3}

    on_cpu = [each for each in inside if each["args"].get("provider") == "CPUExecutionProvider"]
    copies = [each for each in inside if kind[id(each)] in COPIES]
    return {
        "run_ms": run["dur"] / 1e3,
        "loop_ms": loop["dur"] / 1e3 if loop else None,
        "outside": summed([each for each in nodes if each is not loop and each not in inside]),
        "inside": summed(inside),
        "inside_on_cpu": {**summed(on_cpu), "kinds": Counter(kind[id(each)] for each in on_cpu).most_common(8)},
        "copies": {**summed(copies), "kinds": Counter(kind[id(each)] for each in copies)},
        "slowest_ms": [
            (name, ms / 1e3, count)
            for name, ms, count in sorted(
                (
                    (op, sum(e["dur"] for e in inside if kind[id(e)] == op), sum(kind[id(e)] == op for e in inside))
                    for op in {kind[id(each)] for each in inside}
                ),
                key=lambda found: -found[1],
            )[:10]
        ],
    }


def busy_ms(draw: Callable[[], Any]) -> dict[str, float] | None:
    """What the GPU computed and copied for one image, by torch's profiler (CUPTI); None where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        draw()
        torch.cuda.synchronize()
    found = [each for each in recorded.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    copies = [each for each in found if each.name.startswith("Memcpy")]
    kernels = [each for each in found if not each.name.startswith(("Memcpy", "Memset"))]
    return {
        "kernels": len(kernels),
        "kernels_ms": sum(each.time_range.elapsed_us() for each in kernels) / 1e3,
        "copies": dict(Counter(each.name for each in copies)),
        "copies_ms": sum(each.time_range.elapsed_us() for each in copies) / 1e3,
    }


def measure(given: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    from sdflow.distance import psnr
    from sdflow.export.one_file import Wanted, export_one_file
    from sdflow.runtime.pipeline import Pipeline

    folder = given
    if not any(given.glob("*/*.data")):
        folder = scratch / given.name
        begun = time.perf_counter()
        materialize(given, folder)
        say(f"{given.name}: weights bound in {time.perf_counter() - begun:.0f} s")
    pipeline = Pipeline.load(folder, options.target, checker=False)
    size = pipeline.latents
    noise = np.random.default_rng(0).standard_normal((1, size.channels, size.size, size.size), np.float32)

    def by_pipeline() -> Any:
        return pipeline(
            PROMPT,
            negative_prompt=NEGATIVE if pipeline.defaults["text"].guidance_scale > 1 else None,
            latents=torch.from_numpy(noise),
            num_inference_steps=options.steps,
            output_type="np",
        ).images

    wanted = np.asarray(by_pipeline())
    by_pipeline()
    found: dict[str, Any] = {"pipeline_ms": milliseconds(by_pipeline, options.rounds), "gpu": busy_ms(by_pipeline)}
    say(f"{given.name}, {options.steps} steps: the pipeline {found['pipeline_ms']:.1f} ms")
    for label, images in (("any size", None), ("one size", 1)):
        try:
            out = scratch / f"{given.name}_{'one' if images else 'any'}.onnx"
            begun = time.perf_counter()
            made = export_one_file(folder, out, Wanted(steps=options.steps, checker=False, images=images))
            each: dict[str, Any] = {"export_s": time.perf_counter() - begun, "bytes": made.bytes}
            told = json.loads(Path(f"{out}.json").read_bytes())
            begun = time.perf_counter()
            session = session_of(out, options.target)
            each["load_s"] = time.perf_counter() - begun
            feeds = feeds_of(session, pipeline, told, noise)

            def by_graph(session: Any = session, feeds: Any = feeds) -> Any:
                return session.run(["images"], feeds)[0]

            begun = time.perf_counter()
            image = np.asarray(by_graph())
            each["first_s"] = time.perf_counter() - begun
            by_graph()
            each["ms"] = milliseconds(by_graph, options.rounds)
            each["ratio"] = each["ms"] / found["pipeline_ms"]
            each["apart"] = float(abs(image - wanted).max())
            each["relative_l2"], each["decibels"] = distance(image, wanted), psnr(image, wanted)
            each["gpu"] = busy_ms(by_graph)
            say(
                f"  one file, {label}: {each['ms']:.1f} ms, {each['ratio']:.2f} of the pipeline's; largest difference "
                f"{each['apart']:.1e}, relative L2 {each['relative_l2']:.4f}, {each['decibels']:.1f} dB; loaded in "
                f"{each['load_s']:.1f} s, first image {each['first_s']:.1f} s"
            )
            del session
            profiled = session_of(out, options.target, scratch / "profile")
            for _ in range(2):
                profiled.run(["images"], feeds)
            path = Path(profiled.end_profiling())
            each["profile"] = read_profile(path)
            path.unlink()
            say(f"    {json.dumps(each['profile'])}\n    GPU: {json.dumps(each['gpu'])}")
            found[label] = each
        except Exception:  # noqa: BLE001  the others are measured all the same
            traceback.print_exc()
    say(f"  GPU in the pipeline: {json.dumps(found['gpu'])}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="+", metavar="PIPELINE")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    for pipeline in options.pipelines:
        with tempfile.TemporaryDirectory(prefix="one-file-") as scratch:
            try:
                found[pipeline.name] = measure(pipeline, Path(scratch), options)
            except Exception:  # noqa: BLE001  the others are measured all the same
                traceback.print_exc()
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
