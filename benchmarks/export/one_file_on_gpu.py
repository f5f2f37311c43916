"""Compare a pipeline as one ONNX graph on a GPU with the pipeline itself: image, time, and a profile.

    python benchmarks/export/one_file_on_gpu.py PIPELINE... [--steps 20] [--rounds 5] [--out FILE.json] [--target cpu]

PIPELINE: a built folder, or the output of benchmarks/gpu/structures.py for one, whose weights are then bound here. The
graph runs with arrays as inputs and outputs, once for any size and once for the single size generated here (`--height`,
`--width`, `--images` of `sdflow export`). All times are measured first, because a profiler slows everything queued
after it in the process. Then one image of each is profiled: nodes on the CPU, copies between CPU and GPU, kernels, and
the GPU's idle time. Use `--target cpu` to try it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.export.one_file_feeds import graph_feeds
from benchmarks.gpu.pipelines_on_gpu import distance, materialize, milliseconds, say

PROMPT, NEGATIVE = "a large red circle on a blue background", ""
COPIES = ("MemcpyToHost", "MemcpyFromHost")


def session_of(graph: Path, target: str, profile: Path | None = None) -> Any:
    import onnxruntime

    from sdflow.runtime.sessions.session import provider_options
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


def work_of_gpu(draw: Callable[[], Any]) -> dict[str, float] | None:
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
        "most": _by_name(kernels),
        "copies": dict(Counter(each.name for each in copies)),
        "copies_ms": sum(each.time_range.elapsed_us() for each in copies) / 1e3,
    }


def _by_name(kernels: list[Any]) -> list[tuple[str, int, float]]:
    """The kernels by the name of their function: how many, and their milliseconds; those with the most time first."""
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for each in kernels:
        name = re.sub(r"<.*|\(.*", "", each.name.replace("(anonymous namespace)::", "").removeprefix("void "))[-60:]
        count[name] += 1
        spent[name] += each.time_range.elapsed_us()
    return [(name, count[name], us / 1e3) for name, us in spent.most_common(25)]


class Measured:
    """One pipeline, and its graph for any size and for one. folder: with its weights."""

    def __init__(self, given: Path, scratch: Path, options: argparse.Namespace) -> None:
        from sdflow.runtime.pipeline import Pipeline

        self.given, self.scratch, self.options, self.folder = given, scratch, options, given
        if not any(given.glob("*/*.data")):
            self.folder = scratch / given.name
            begun = time.perf_counter()
            materialize(given, self.folder)
            say(f"{given.name}: weights bound in {time.perf_counter() - begun:.0f} s")
        self.pipeline = Pipeline.load(self.folder, options.target, checker=False)
        size = self.pipeline.latents
        shape = (1, size.channels, size.size, size.size)
        self.noise = np.random.default_rng(0).standard_normal(shape, np.float32)
        self.graphs = {"any size": scratch / f"{given.name}_any.onnx", "one size": scratch / f"{given.name}_one.onnx"}
        self.found: dict[str, Any] = {}

    def by_pipeline(self) -> Any:
        return self.pipeline(
            PROMPT,
            negative_prompt=NEGATIVE if self.pipeline.defaults["text"].guidance_scale > 1 else None,
            latents=torch.from_numpy(self.noise),
            num_inference_steps=self.options.steps,
            output_type="np",
        ).images

    def feeds(self, session: Any, label: str) -> dict[str, Any]:
        told = json.loads(Path(f"{self.graphs[label]}.json").read_bytes())
        return graph_feeds(session, told, self.pipeline.companions.__getitem__, self.noise, PROMPT, NEGATIVE)

    def times(self) -> None:
        wanted = np.asarray(self.by_pipeline())
        self.by_pipeline()
        self.found["pipeline_ms"] = milliseconds(self.by_pipeline, self.options.rounds)
        say(f"{self.given.name}, {self.options.steps} steps: the pipeline {self.found['pipeline_ms']:.1f} ms")
        for label in self.graphs:
            try:
                self.found[label] = self.time(label, wanted)
            except Exception:  # noqa: BLE001  the others are measured all the same
                traceback.print_exc()

    def time(self, label: str, wanted: Any) -> dict[str, Any]:
        from sdflow.distance import psnr
        from sdflow.export.one_file import Wanted, export_one_file

        begun = time.perf_counter()
        wants = Wanted(steps=self.options.steps, checker=False, images=1 if label == "one size" else None)
        made = export_one_file(self.folder, self.graphs[label], wants)
        each: dict[str, Any] = {"export_s": time.perf_counter() - begun, "bytes": made.bytes}
        begun = time.perf_counter()
        session = session_of(self.graphs[label], self.options.target)
        each["load_s"] = time.perf_counter() - begun
        feeds = self.feeds(session, label)

        def by_graph() -> Any:
            return session.run(["images"], feeds)[0]

        begun = time.perf_counter()
        image = np.asarray(by_graph())
        each["first_s"] = time.perf_counter() - begun
        by_graph()
        each["ms"] = milliseconds(by_graph, self.options.rounds)
        each["ratio"] = each["ms"] / self.found["pipeline_ms"]
        each["apart"] = float(abs(image - wanted).max())
        each["relative_l2"], each["decibels"] = distance(image, wanted), psnr(image, wanted)
        say(
            f"  one file, {label}: {each['ms']:.1f} ms, {each['ratio']:.2f} of the pipeline's; largest difference "
            f"{each['apart']:.1e}, relative L2 {each['relative_l2']:.4f}, {each['decibels']:.1f} dB; loaded in "
            f"{each['load_s']:.1f} s, first image {each['first_s']:.1f} s"
        )
        return each

    def profiles(self) -> None:
        """Behind all times."""
        self.found["gpu"] = work_of_gpu(self.by_pipeline)
        say(f"{self.given.name}: GPU in the pipeline: {json.dumps(self.found['gpu'])}")
        for label in self.graphs:
            try:
                if label in self.found:
                    self.found[label] |= self.profile(label)
            except Exception:  # noqa: BLE001  the others are measured all the same
                traceback.print_exc()

    def profile(self, label: str) -> dict[str, Any]:
        session = session_of(self.graphs[label], self.options.target)
        feeds = self.feeds(session, label)
        session.run(["images"], feeds)
        session.run(["images"], feeds)
        busy = work_of_gpu(lambda: session.run(["images"], feeds))
        profiled = session_of(self.graphs[label], self.options.target, self.scratch / "profile")
        for _ in range(2):
            profiled.run(["images"], feeds)
        path = Path(profiled.end_profiling())
        found = {"gpu": busy, "profile": read_profile(path)}
        path.unlink()
        say(f"  {label}: {json.dumps(found['profile'])}\n    GPU: {json.dumps(busy)}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="+", metavar="PIPELINE")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--profiles", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="one-file-") as scratch:
        measured = []
        for given in options.pipelines:
            measured.append(Measured(given, Path(scratch), options))
            measured[-1].times()
        for each in measured if options.profiles else ():
            each.profiles()
    if options.out is not None:
        options.out.write_text(json.dumps({each.given.name: each.found for each in measured}, indent=1))


if __name__ == "__main__":
    main()
