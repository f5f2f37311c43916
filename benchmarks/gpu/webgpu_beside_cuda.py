"""Compare a pipeline through WebGPU with the same one on CUDA: times per step and image, node placement, distances.

    python benchmarks/gpu/webgpu_beside_cuda.py WEIGHTS NAME [NAME ...] [--engines float32 cuda webgpu] [--steps 20]
        [--size N] [--guidance 5] [--rounds 5] [--seconds 40] [--deadline N] [--limit N] [--processes 1] [--json FILE]
        [--images DIR] [--graphs DIR]

WEIGHTS/NAME_cuda, WEIGHTS/NAME_webgpu: output of benchmarks/gpu/with_weights.py; one that is still being made is waited
for. Each engine runs in a process of its own, one after the other, so that none takes the other's memory, and draws the
same latents. `float32` is diffusers' own pipeline in float32 (TensorFloat-32 off), the yardstick of the distances; the
engines after it also run each submodel on the inputs that it had there. Rounds are repeated until --seconds have
passed. A step is the difference between all and half the steps; an image ends on the host. Memory and load are the
driver's, of the whole device. What an engine has found is printed at once, the step first, and kept if the engine fails
or is ended. --deadline: no engine is started after so many seconds, and one that runs is ended; --limit: seconds that an
engine may run. FILE is updated after each engine. The exit status is 1 if an engine failed, a node is not on the GPU,
or a value is not finite. `--engines float32 cpu webgpu` compares with the target `cpu`, to try it without an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.unattended import Results, wait_for

FLOAT32 = "float32"
CASES = ".pt"
ARRAYS = ".npz"
SAMPLE_MS = 100


@contextmanager
def watched(found: dict[str, Any]) -> Iterator[None]:
    """Meanwhile the driver is asked for the device's memory in use and its load. Nothing is noted without a driver."""
    query = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.Popen([*query, f"--loop-ms={SAMPLE_MS}"], stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield
        return
    try:
        yield
    finally:
        asked.terminate()
        lines = asked.communicate()[0].splitlines()
        samples = [[float(each) for each in line.split(",")] for line in lines if line.count(",") == 1]
        if samples:
            found["device_gb"] = max(used for used, _ in samples) * 2**20 / 1e9
            found["load_percent"] = statistics.median(load for _, load in samples)


def measure(runs: dict[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each run, in turns: once at least, and another round while there is time for it."""
    times: dict[str, list[float]] = {what: [] for what in runs}
    begun = before = time.perf_counter()
    for done in range(rounds):
        now = time.perf_counter()
        if done and now - begun + (now - before) > seconds:
            break
        before = now
        for what, run in runs.items():
            started = time.perf_counter()
            run()
            times[what].append((time.perf_counter() - started) * 1e3)
    return times


def call_of(options: argparse.Namespace, size: int) -> dict[str, Any]:
    return {
        "height": size, "width": size, "num_inference_steps": options.steps, "guidance_scale": options.guidance,
    }  # fmt: skip


def compared(pipeline: Any, cases: Path, errors: dict[str, str]) -> dict[str, dict[str, float]]:
    """Submodel -> run -> its outputs' largest distance from float32, on float32's inputs. errors: what a submodel ended with."""
    import numpy as np
    import torch

    from benchmarks.gpu.beside_float32 import relative

    found: dict[str, dict[str, float]] = {}
    for name, every in torch.load(cases).items():
        try:
            for what, inputs, outputs in every:
                given = {key: value.numpy() for key, value in inputs.items()}
                ours = {
                    key: torch.from_numpy(np.float32(value)) for key, value in pipeline.submodels[name](**given).items()
                }
                wanted = {key: value for key, value in outputs.items() if key in ours}
                found.setdefault(name, {})[what] = max(relative(ours, wanted).values())
        except Exception:  # noqa: BLE001  the other submodels are compared all the same
            errors[name] = traceback.format_exc()
    return found


def built(folder: Path, target: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a pipeline of sdflow takes and where its nodes are; its latents and image."""
    import numpy as np
    import torch

    from benchmarks.gpu.beside_float32 import placements
    from benchmarks.gpu.pipelines_on_gpu import PROMPT
    from sdflow.machine.plugins import device_facts, plugins_of
    from sdflow.machine.providers import onnxruntime_for
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.targets import TARGETS

    found: dict[str, Any] = {"errors": dict[str, str]()}
    begun = time.perf_counter()

    def seen(what: str, **values: Any) -> None:
        found.update(values)
        options.child.write_text(json.dumps(found))
        print(f"  {folder.name}, {time.perf_counter() - begun:.1f} s: {what}", flush=True)

    pipeline = Pipeline.load(folder, target, checker=False)
    what = pipeline.latents
    size = found["size"] = options.size or what.image_size
    shape = (1, what.channels, size // what.scale, size // what.scale)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(7))

    def draw(kind: str, steps: int = options.steps, **more: Any) -> Any:
        call = {**call_of(options, size), "num_inference_steps": steps}
        return np.float32(pipeline(PROMPT, latents=latents, output_type=kind, **call, **more).images)

    told = {
        "callback_on_text_end": lambda: seen("the prompt is encoded"),
        "callback_on_step_end": lambda index, *_: seen(f"step {index + 1}"),
    }
    ends = {"latents": draw("latent", **told)}
    np.savez(options.child.with_suffix(ARRAYS), **ends)
    placed = placements(pipeline, folder)
    nodes = ", ".join(f"{label} {each['nodes']}, fallen {len(each['fallen'])}" for label, each in placed.items())
    seen(f"first latents; {nodes}", latents_s=time.perf_counter() - begun, placement=placed)
    runs: dict[str, Callable[[], Any]] = {
        "steps": lambda: draw("latent"),
        "half": lambda: draw("latent", options.steps // 2),
    }

    def step_ms(times: dict[str, list[float]]) -> float:
        whole, half = (statistics.median(times[each]) for each in ("steps", "half"))
        return (whole - half) / (options.steps - options.steps // 2)

    times = measure(runs, 1, options.seconds)
    seen(f"a step {step_ms(times):.1f} ms, once", times_ms=times, step_ms=step_ms(times))
    try:
        ends["image"] = draw("np")
        runs["image"] = lambda: draw("np")
        seen("first image", first_image_s=time.perf_counter() - begun)
    except Exception:  # noqa: BLE001  the steps are measured all the same
        found["errors"]["image"] = traceback.format_exc()
        seen("no image", placement=placements(pipeline, folder))
    np.savez(options.child.with_suffix(ARRAYS), **ends)
    with watched(found):
        times = measure(runs, options.rounds, options.seconds)
    seen(f"a step {step_ms(times):.1f} ms", times_ms=times, step_ms=step_ms(times))
    if "image" in times:
        image, steps = (statistics.median(times[each]) for each in ("image", "steps"))
        seen(f"an image {image:.0f} ms", image_ms=image, decode_ms=image - steps)
    found["placement"] = placements(pipeline, folder)
    if options.cases is not None:
        found["submodels"] = compared(pipeline, options.cases, found["errors"])
        found["placement"] |= placements(pipeline, folder)
    ort, provider = onnxruntime_for(TARGETS[target])
    found["onnxruntime"], found["provider"] = ort.__version__, provider
    found["devices"] = [device_facts(each) for each in plugins_of(ort, TARGETS[target]).devices.get(provider, [])]
    return found, ends


def plain(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """diffusers' latents and image in float32; its submodels' inputs and outputs go beside --child."""
    import torch

    from benchmarks.gpu.beside_float32 import compute_reference, open_checkpoint_of
    from benchmarks.gpu.random_weights import made_by
    from sdflow.sources import load_pipeline

    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    begun = time.perf_counter()
    checkpoint = open_checkpoint_of(folder)
    with made_by(options.processes):
        pipeline = load_pipeline(checkpoint)
    if "safety_checker" in pipeline.components:
        pipeline.register_modules(safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline.to(device)
    what = checkpoint.family.latents({name: each.load["config"] for name, each in checkpoint.submodels.items()})
    size = options.size or what.image_size
    shape = (1, what.channels, size // what.scale, size // what.scale)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    reference = compute_reference(checkpoint, pipeline, call_of(options, size), latents, device)
    torch.save(reference.cases, options.child.with_suffix(CASES))
    found = {"size": size, "seconds": time.perf_counter() - begun}
    return found, {"latents": reference.latents, "image": reference.image}


def child(options: argparse.Namespace) -> None:
    """One engine of one pipeline, in this process; its JSON and arrays go to --child."""
    import numpy as np

    (name,), (engine,) = options.names, options.engines
    if engine == FLOAT32:
        found, ends = plain(options.checkpoint, options)
    else:
        found, ends = built(options.weights / f"{name}_{engine}", engine, options)
    found["finite"] = bool(all(np.isfinite(each).all() for each in ends.values()))
    np.savez(options.child.with_suffix(ARRAYS), **ends)
    options.child.write_text(json.dumps(found))


def compare_with(right: str, ends: dict[str, dict[str, Any]], found: dict[str, dict[str, float]]) -> None:
    """Add and print the distances of an engine's latents and image from those of each engine before it."""
    from benchmarks.gpu.pipelines_on_gpu import distance
    from sdflow.distance import psnr

    mine = ends[right]
    for left, other in ends.items():
        if left == right:
            continue
        each = found[f"{right} from {left}"] = {"latents": distance(mine["latents"], other["latents"])}
        image = ""
        if "image" in mine and "image" in other:
            each |= {"image": distance(mine["image"], other["image"]), "psnr": psnr(mine["image"], other["image"])}
            image = f", image {each['image']:.4f}, {each['psnr']:.1f} dB"
        print(f"  {right} from {left}: latents {each['latents']:.4f}{image}", flush=True)


def fallen(found: dict[str, Any]) -> list[str]:
    """The nodes that are not on the engine's provider."""
    return [f"{label}: {node}" for label, each in found.get("placement", {}).items() for node in each["fallen"]]


def table(name: str, found: dict[str, Any]) -> None:
    for engine, each in found["engines"].items():
        if "step_ms" in each:
            nodes = sum(sum(part["nodes"].values()) for part in each["placement"].values())
            memory = (
                f"{each.get('device_gb', float('nan')):.1f} GB, load {each.get('load_percent', float('nan')):.0f} %"
            )
            print(
                f"{name} {each['size']}x{each['size']} {engine}: a step {each['step_ms']:.1f} ms, first latents after"
            )
            print(f"  {each['latents_s']:.1f} s; {len(fallen(each))} of {nodes} nodes not on the GPU; {memory}")
            if "image_ms" in each:
                print(
                    f"  an image {each['image_ms']:.0f} ms ({each['decode_ms']:.0f} after the steps), the first after"
                )
                print(f"  {each['first_image_s']:.1f} s", flush=True)
        for submodel, distances_of in each.get("submodels", {}).items():
            said = ", ".join(f"{what} {distance:.1e}" for what, distance in distances_of.items())
            print(f"    {submodel} on float32's inputs: {said}")


def compare(name: str, options: argparse.Namespace, results: Results, end: float) -> None:
    """All engines of one pipeline."""
    import numpy as np

    found = results.found.setdefault(name, {"engines": {}, "distances": {}})
    ends: dict[str, dict[str, Any]] = {}
    built_for = [engine for engine in options.engines if engine != FLOAT32]
    checkpoint = (options.graphs or options.weights) / f"{name}_{built_for[0]}"
    more = ["--checkpoint", str(checkpoint)]
    for key in ("steps", "guidance", "rounds", "seconds", "processes", "size"):
        more += [] if getattr(options, key) is None else [f"--{key}", str(getattr(options, key))]
    with tempfile.TemporaryDirectory(prefix="beside-") as scratch:
        for engine in options.engines:
            out = Path(scratch) / f"{engine}.json"
            with results.part(f"{name}, {engine}"):
                if engine in built_for:
                    wait_for(options.weights / f"{name}_{engine}")
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError("the deadline has passed")
                cases = Path(scratch) / f"{FLOAT32}{CASES}"
                given = ["--cases", str(cases)] if engine in built_for and cases.exists() else []
                command = [sys.executable, __file__, str(options.weights), name, "--engines", engine]
                try:
                    patience = min(left, options.limit)
                    subprocess.run([*command, "--child", str(out), *given, *more], check=True, timeout=patience)
                finally:  # also of an engine that failed or was ended
                    if out.exists():
                        each = found["engines"][engine] = json.loads(out.read_text())
                    if (arrays := out.with_suffix(ARRAYS)).exists():
                        with np.load(arrays) as drawn:
                            ends[engine] = dict(drawn)
                        compare_with(engine, ends, found["distances"])
                        if options.images is not None and "image" in ends[engine]:
                            save(options.images / f"{name}_{engine}.png", ends[engine]["image"][0])
                if problems := problems_of(each):
                    raise RuntimeError("; ".join(problems))
    table(name, found)


def problems_of(found: dict[str, Any]) -> list[str]:
    wrong = fallen(found)
    problems = [f"{len(wrong)} nodes are not on the GPU: {', '.join(wrong[:4])}"] if wrong else []
    problems += [f"{name} failed: {error}" for name, error in found.get("errors", {}).items()]
    return problems if found["finite"] else [*problems, "a value is not finite"]


def save(path: Path, image: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * image).round().astype("uint8")).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--engines", nargs="+", default=[FLOAT32, "cuda", "webgpu"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int)
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--deadline", type=float, default=float("inf"))
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--graphs", type=Path, help="pipelines without weights, if those with are still being made")
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options)
        return
    results, end = Results(options.json), time.monotonic() + options.deadline
    for name in options.names:
        compare(name, options, results, end)
    sys.exit(results.failed)


if __name__ == "__main__":
    main()
