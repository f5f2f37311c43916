"""Measure guidance's halves on a GPU each against both on one GPU, in turns in one process.

    python benchmarks/gpu/two_devices.py PIPELINE... [--steps 30] [--guidance 5] [--size N] [--rounds 5] [--json FILE]
        [--target cpu]

PIPELINE: with weights (benchmarks/gpu/with_weights.py), of a family with true guidance. Both variants share all sessions
but the denoiser's. Rows: a step (host time between synchronizations over all steps of an image but the first, divided
by their number), an image from text to pixels, and a step with half the batch on each GPU alone, which is the best that
two could do. The exchange alone: a prediction copied from the second GPU to the first, once per synchronization and
queued, directly and through page-locked host memory. Distances: of the latents on two GPUs from those on one; beside it,
as a yardstick, of the same image on one GPU in a batch of two, which rounds differently too. `--target cpu` is to try it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # before ONNX Runtime

from benchmarks.gpu.pipelines_on_gpu import PROMPT, distance, say
from benchmarks.gpu.unattended import Results

NEGATIVE = "blurry"
EXCHANGES = 300


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


class Drawer:
    """Draws with a pipeline. call: arguments without latents."""

    def __init__(self, pipeline: Any, call: dict[str, Any]) -> None:
        self.pipeline, self.call = pipeline, call

    def latents(self, images: int = 1) -> torch.Tensor:
        what, size = self.pipeline.latents, self.call["height"]
        shape = (1, what.channels, size // what.scale, size // what.scale)
        return torch.randn(shape, generator=torch.Generator().manual_seed(7)).repeat(images, 1, 1, 1)

    def drawing(self, images: int = 1) -> Any:
        return self.pipeline.drawing([PROMPT] * images, latents=self.latents(images), **self.call)

    def image(self) -> Any:
        return self.pipeline(PROMPT, latents=self.latents(), output_type="np", **self.call).images

    def step(self) -> float:
        """Milliseconds."""
        with self.pipeline.place.current(), torch.no_grad():
            drawing = self.drawing()
            drawing.step()
            synchronize()
            begun, runs = time.perf_counter(), drawing.runs - 1
            drawing.run()
            synchronize()
            return (time.perf_counter() - begun) / runs * 1e3

    def drawn(self, images: int = 1) -> Any:
        """The latents of the first of equal images."""
        with self.pipeline.place.current(), torch.no_grad():
            drawing = self.drawing(images)
            drawing.run()
            return drawing.latents()[:1].float().cpu().numpy()


def timed(run: Callable[[], Any]) -> float:
    synchronize()
    begun = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - begun) * 1e3


def halves(two: Drawer) -> dict[str, float]:
    """Milliseconds of a step of half the batch, on each device while the other one rests."""
    found = {}
    with two.pipeline.place.current(), torch.no_grad():
        drawing = two.drawing()
        drawing.step()
        denoiser, latents, count = drawing.denoiser, drawing.latents(), drawing.runs - 1
        own, other = denoiser._inputs(drawing.inputs)

        def first() -> None:
            for index in range(count):
                denoiser._first.run(own, latents, index)

        def second() -> None:
            for index in range(count):
                denoiser._worker.submit(denoiser._run_second, other, index).result()

        for name, run in (("first", first), ("second", second)):
            timed(run)
            found[name] = min(timed(run) for _ in range(2)) / count
    return found


def exchange(two: Drawer) -> dict[str, Any]:
    """Microseconds of one prediction copied from the second device to the first."""
    drawing = two.drawing()
    drawing.step()
    kept, (first, second) = drawing.denoiser._both, (drawing.denoiser._own, drawing.denoiser._other)
    half = kept[: len(kept) // 2]
    source = torch.zeros_like(half, device=second.device)
    host = torch.zeros_like(half, device="cpu")
    host = host.pin_memory() if first.stream is not None else host

    def directly() -> None:
        half.copy_(source, non_blocking=True)

    def by_host() -> None:
        with second.current():
            host.copy_(source, non_blocking=True)
        if first.stream is not None:
            first.stream.wait_stream(second.stream)
        half.copy_(host, non_blocking=True)

    def queued(run: Callable[[], None]) -> float:
        return timed(lambda: [run() for _ in range(EXCHANGES)]) / EXCHANGES * 1e3

    found: dict[str, Any] = {"bytes": half.nbytes, "type": str(half.dtype)}
    if first.stream is not None:
        found["peer_access"] = [torch.cuda.can_device_access_peer(a, b) for a, b in ((0, 1), (1, 0))]
    with second.current(), first.current():
        for name, run in (("direct", directly), ("by_host", by_host)):
            queued(run)
            found[f"{name}_queued_us"] = queued(run)
            found[f"{name}_alone_us"] = statistics.median(timed(run) for _ in range(EXCHANGES)) * 1e3
    return found


def captured(two: Drawer) -> list[dict[str, Any]]:
    """Of each device's step: whether its session captures a CUDA graph, and where it runs."""
    found = []
    drawing = two.drawing()
    for half in (drawing.denoiser._first, drawing.denoiser._second):
        step = getattr(half, "_step", None)
        session = half._bound.session if step is None else step.whole.session
        options = session.get_provider_options().get("CUDAExecutionProvider", {})
        wanted = ("enable_cuda_graph", "device_id")
        found.append({"in_parts": step is not None, **{name: options.get(name) for name in wanted}})
    return found


def measure(folder: Path, options: argparse.Namespace, results: Results) -> None:
    from sdflow.runtime.pipeline import Pipeline

    found = results.found.setdefault(folder.name, {})
    with results.part(f"{folder.name}: loading"):
        one = Pipeline.load(folder, options.target, checker=False, keep="all")
        two = Pipeline.load(folder, options.target, checker=False, keep="all", devices=2, shared=one.submodels)
        size = options.size or one.latents.image_size
        call = {"height": size, "width": size, "negative_prompt": NEGATIVE}
        call |= {"num_inference_steps": options.steps, "guidance_scale": options.guidance}
        call = {name: value for name, value in call.items() if value is not None}
        ways = {"one": Drawer(one, call), "two": Drawer(two, call)}
        found["call"] = call
    with results.part(f"{folder.name}: first images"):
        latents = {name: way.drawn() for name, way in ways.items()}
        images = {name: way.image() for name, way in ways.items()}
        found["distance"] = {
            "latents": distance(latents["two"], latents["one"]),
            "pixels": distance(images["two"], images["one"]),
            "again": distance(ways["two"].drawn(), latents["two"]),
        }
        found["captured"] = captured(ways["two"])
    with results.part(f"{folder.name}: in turns"):
        times: dict[str, dict[str, list[float]]] = {"step_ms": {}, "image_ms": {}}
        for number in range(options.rounds):
            for name in ("one", "two") if number % 2 == 0 else ("two", "one"):
                times["step_ms"].setdefault(name, []).append(ways[name].step())
                times["image_ms"].setdefault(name, []).append(timed(partial(ways[name].image)))
        found["times"] = times
        found["ms"] = {row: {name: statistics.median(each) for name, each in t.items()} for row, t in times.items()}
        found["ratio"] = {row: each["two"] / each["one"] for row, each in found["ms"].items()}
    with results.part(f"{folder.name}: each half alone"):
        found["half_ms"] = halves(ways["two"])
    with results.part(f"{folder.name}: the exchange"):
        found["exchange"] = exchange(ways["two"])
    with results.part(f"{folder.name}: the yardstick"):
        found["distance"]["in_a_batch_of_two"] = distance(ways["one"].drawn(2), latents["one"])
    if options.target == "cuda":
        found["free_gb"] = [torch.cuda.mem_get_info(index)[0] / 1e9 for index in range(2)]


def told(name: str, found: dict[str, Any]) -> None:
    if "ms" not in found:
        return
    say(f"\n{name}, {found['call']}")
    for row, each in found["ms"].items():
        spread = {way: f"{min(t):.2f} to {max(t):.2f}" for way, t in found["times"][row].items()}
        say(
            f"  {row:9} one {each['one']:9.2f} ({spread['one']})  two {each['two']:9.2f} ({spread['two']})"
            f"  ratio {found['ratio'][row]:.3f}"
        )
    for name in ("half_ms", "exchange", "distance", "captured", "free_gb"):
        say(f"  {name}: {found.get(name)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines", type=Path, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--size", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    results = Results(options.json)
    if options.target == "cuda":
        results.found["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        results.found["torch"] = torch.__version__
    for folder in options.pipelines:
        measure(folder, options, results)
        told(folder.name, results.found[folder.name])
    sys.exit(results.failed)


if __name__ == "__main__":
    main()
