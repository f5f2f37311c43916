"""Pipelines at full size on a GPU: every node on CUDA, images right against float32 PyTorch, times, memory.

    python benchmarks/pipelines_on_gpu.py GRAPHS --draw 'NAME {"num_inference_steps": 4}' ... [--compile] [--rounds 5]
        [--target cpu]

GRAPHS: what benchmarks/structures.py wrote of pipelines that were built from `synthetic:` models. Their weights are bound
here, as BindWeights does; the same weights go to diffusers' own pipelines, in float32 (the reference) and in float16 (the
yardstick, eager or compiled). NAME: a pipeline; the JSON: arguments of its call, "control": true for an image for each of
its ControlNets, "shown": 0.6 for an image prompt at this scale for each of its IP-Adapters, "refiner_start": with its refiner
from there on. An image a call, the same latents for all.
Needs torch, diffusers, transformers, accelerate, onnx and ONNX Runtime. What fails is printed in full, and the rest goes on.
`--target cpu` is to try it: float32, nothing compiled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

PROMPT = "a photo of an astronaut riding a horse on mars"


def say(*words: object) -> None:
    print(*words, flush=True)


def materialize(graphs: Path, out: Path) -> Any:
    """The pipeline folder with its weights, and its checkpoint."""
    from sdflow.manifest import read_manifest
    from sdflow.sources import PlainDigests, reopen_checkpoint
    from sdflow.weights.bind import BindRequest, bind

    manifest = read_manifest(graphs)
    checkpoint = reopen_checkpoint(manifest.origin, str(graphs), digests=PlainDigests())
    shutil.copytree(
        graphs, out, ignore=lambda folder, names: [n for n in names if Path(folder) == graphs and n in manifest.parts]
    )

    def weights(name: str) -> None:
        (out / name).mkdir()
        bind(BindRequest(name, graphs / name, checkpoint.submodels[name].load), out / name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(weights, manifest.parts))
    return checkpoint


class TorchEnsemble:
    """diffusers' base and refiner, called as sdflow's are."""

    def __init__(self, base: Any, refiner: Any) -> None:
        self.base, self.refiner, self.unet = base, refiner, base.unet

    def __call__(
        self, prompt: str, *, latents: Any, refiner_start: float, generator: Any, output_type: str, **more: Any
    ) -> Any:
        both = {"num_inference_steps": more["num_inference_steps"], "generator": generator}
        begun = self.base(
            prompt, latents=latents, denoising_end=refiner_start, output_type="latent", **more, generator=generator
        )
        return self.refiner(prompt, image=begun.images, denoising_start=refiner_start, output_type=output_type, **both)


def parts_of(pipeline: Any) -> list[Any]:
    return [pipeline.base, pipeline.refiner] if isinstance(pipeline, TorchEnsemble) else [pipeline]


def distance(drawn: Any, expected: Any) -> float:
    """Relative L2 of the pixels around the expected image's mean."""
    return sqrt(float(((drawn - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum()))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        synchronize()
        begun = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def edges(size: int) -> Any:
    """An image of lines, as an edge detector gives."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[:size, :size]
    lines = ((rows + columns) % (size // 8) < 3) | ((rows - columns) % (size // 8) < 3)
    return Image.fromarray(np.repeat((255 * lines).astype("uint8")[..., None], 3, axis=2))


def cloned(outputs: Any) -> Any:
    """The outputs in memory of their own: those of a captured graph are overwritten when the next graph runs."""
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    if isinstance(outputs, dict):  # transformers' and diffusers' outputs are dataclasses that are dictionaries
        return type(outputs)(**{key: cloned(value) for key, value in outputs.items()})
    return type(outputs)(map(cloned, outputs)) if isinstance(outputs, (tuple, list)) else outputs


def compile_parts(pipeline: Any) -> None:
    """Compile UNet, ControlNets and decoder of one of diffusers' pipelines in place: torch.compile, reduce-overhead."""

    def compiled(module: Any, method: str) -> None:
        run = torch.compile(getattr(module, method), mode="reduce-overhead", fullgraph=True, dynamic=False)

        def call(*arguments: Any, **named: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return cloned(run(*arguments, **named))

        setattr(module, method, call)

    compiled(pipeline.unet, "forward")
    net = getattr(pipeline, "controlnet", None)
    for each in getattr(net, "nets", [net] if net is not None else []):
        compiled(each, "forward")
    compiled(pipeline.vae, "decode")


class Case:
    """One way to call one pipeline, by sdflow and by diffusers."""

    def __init__(self, pipeline: Any, arguments: dict[str, Any]) -> None:
        from sdflow.families.image_prompts import adapter_count

        base = getattr(pipeline, "base", pipeline)
        what, given = base.latents, dict(arguments)
        size = int(given.pop("size", what.image_size))
        self.control = {name: edges(size) for name in base.nets} if given.pop("control", False) else {}
        adapters = adapter_count(base.configs[base.family.denoiser])
        self.scales = [float(given.pop("shown", 0.0))] * adapters
        self.shown = [edges(256).rotate(30 * index) for index in range(len(self.scales))]
        self.common = {"height": size, "width": size, "output_type": "np", **given}
        shape = (1, what.channels, size // what.scale, size // what.scale)
        self.latents = torch.randn(shape, generator=torch.Generator().manual_seed(7))

    def ours(self, pipeline: Any) -> Any:
        more: dict[str, Any] = {"control": self.control} if self.control else {}
        if any(self.scales):
            more |= {"ip_adapter_image": self.shown, "ip_adapter_scale": self.scales}
        generator = torch.Generator().manual_seed(
            0
        )  # of the CPU: schedulers that draw noise in every step draw the same
        return pipeline(PROMPT, latents=self.latents, generator=generator, **self.common, **more).images

    def theirs(self, pipeline: Any) -> Any:
        more: dict[str, Any] = {}
        if self.control:
            more["image"] = list(self.control.values())
        if self.shown:  # at a scale of 0 too: diffusers takes no call without one
            more["ip_adapter_image"] = self.shown
            pipeline.set_ip_adapter_scale(self.scales)
        latents = self.latents.to(pipeline.unet.device, pipeline.unet.dtype)
        generator = torch.Generator().manual_seed(0)
        return pipeline(PROMPT, latents=latents, generator=generator, **self.common, **more).images


def placements(pipeline: Any, folder: Path) -> None:
    """Where the nodes of every session ran: a line each."""
    from sdflow.runtime.placement import placement

    for name, submodel in pipeline.submodels.items():
        for bound in submodel._bound.values():
            say(f"  {name}: {placement(bound.session, (folder / name / 'model.onnx').resolve())}")
    for denoiser in pipeline.denoisers.kept.values():
        for attribute in ("_text", "_step"):
            if hasattr(denoiser, attribute):
                path = (folder / pipeline.family.denoiser / "model.onnx").resolve()
                say(f"  {attribute}: {placement(getattr(denoiser, attribute).session, path)}")


def compare(name: str, graphs: Path, calls: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from sdflow.bench.drawers import with_float32_noise
    from sdflow.distance import psnr
    from sdflow.runtime.ensemble import Ensemble
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.sources.load import load_pipeline

    begun = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="on-gpu-")) / name
    checkpoint = materialize(graphs, folder)
    say(f"{name}: weights bound in {time.perf_counter() - begun:.0f} s")
    begun = time.perf_counter()
    exact = load_pipeline(checkpoint).to(options.target)
    refiner = graphs / "refiner"  # where `sdflow run` puts it
    if any("refiner_start" in call for call in calls):
        import diffusers

        parts = load_pipeline(materialize(refiner, folder.with_name(f"{name}_refiner"))).to(options.target).components
        refining = diffusers.StableDiffusionXLImg2ImgPipeline(
            **parts, requires_aesthetics_score=True, force_zeros_for_empty_prompt=False
        )
        exact = TorchEnsemble(exact, refining)
    for each in parts_of(exact):
        each.set_progress_bar_config(disable=True)
    say(f"{name}: PyTorch loaded in {time.perf_counter() - begun:.0f} s")
    if isinstance(exact, TorchEnsemble):
        ours = Ensemble.load(folder, folder.with_name(refiner.name), options.target, checker=False)
    else:
        ours = Pipeline.load(folder, options.target, checker=False)
    cases = [Case(ours, call) for call in calls]
    with torch.no_grad():
        expected = [case.theirs(exact) for case in cases]
    for each in parts_of(exact):
        each.scheduler.step = with_float32_noise(each.scheduler.step)
        each.to(torch.float16 if options.target == "cuda" else torch.float32)
        for component in ("unet", "vae", "controlnet"):
            if isinstance(module := getattr(each, component, None), torch.nn.Module):
                module.to(memory_format=torch.channels_last)
        if options.compile:
            compile_parts(each)
    plain = exact
    for case, call, right in zip(cases, calls, expected, strict=True):
        say(f"{name} {json.dumps(call)}")
        drawn = case.ours(ours)
        say(
            f"  sdflow {distance(drawn, right):.4f} relative L2, {psnr(drawn, right):.1f} dB; spread {float(right.std()):.3f}"
        )
        try:
            begun = time.perf_counter()
            half = case.theirs(plain)
            said = "compiled" if options.compile else "eager"
            say(
                f"  float16 PyTorch, {said}: {distance(half, right):.4f}, {psnr(half, right):.1f} dB; first image "
                f"{time.perf_counter() - begun:.0f} s"
            )
            case.theirs(plain)
            theirs = [milliseconds(lambda case=case: case.theirs(plain), 1) for _ in range(options.rounds)]
            say(f"  float16 PyTorch, {said}: {statistics.median(theirs):.1f} ms")
        except Exception:  # noqa: BLE001  the others are measured all the same
            traceback.print_exc()
        case.ours(ours)
        say(f"  sdflow: {milliseconds(lambda case=case: case.ours(ours), options.rounds):.1f} ms")
    placements(getattr(ours, "base", ours), folder)
    if hasattr(ours, "refiner"):
        placements(ours.refiner, folder.with_name(refiner.name))
    if options.target == "cuda":
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved() / 1e9
        say(f"{name}: device memory in use by all {(total - free) / 1e9:.2f} GB, of PyTorch {reserved:.2f}")
    shutil.rmtree(folder.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--draw", action="append", required=True, metavar="NAME JSON")
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--compile", action="store_true", help="compile PyTorch's UNet, ControlNets and decoder")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    calls: dict[str, list[dict[str, Any]]] = {}
    for each in options.draw:
        name, _, text = each.partition(" ")
        calls.setdefault(name, []).append(json.loads(text or "{}"))
    for name, wanted in calls.items():
        try:
            compare(name, options.graphs / name, wanted, options)
        except Exception:  # noqa: BLE001  the others are measured all the same
            traceback.print_exc()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
