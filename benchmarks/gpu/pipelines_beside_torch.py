"""Compare the output of benchmarks/gpu/pipelines_on_gpu.py with diffusers' own pipelines: images, times and memory.

    python benchmarks/gpu/pipelines_beside_torch.py GRAPHS DIR NAME [--compile] [--rounds 5] [--turn FILE --of 3] [--device cpu]

GRAPHS, NAME: as there. DIR: its `--drawn`. diffusers gets the same weights, in float32 (the reference, TensorFloat-32
off) and in float16 as users run it (TensorFloat-32 for float32 parts): eager, or with UNets, ControlNets and decoder
compiled with reduce-overhead and fused query, key and value. Run one pipeline per process, so that its memory is
separate. Compiling takes minutes of one core: `--turn` is a file in a folder shared by several processes, `--of` their
number; they compile in parallel, and are measured one by one once all are ready.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.gpu.pipelines_on_gpu import PROMPT, REFINER, distance, milliseconds, say, synchronize, used

WARM_UP_STEPS = 10
"""As many as give a refiner two. Shapes are those of the whole way, so nothing is compiled for it again."""

PATIENCE_SECONDS = 280
"""How long one waits for the others to be ready."""


class Turn:
    """Several processes use the device one after another. flag: a file of this one's, in a folder that they share; of: how
    many they are."""

    def __init__(self, flag: Path, of: int) -> None:
        self.flag, self.of = flag, of
        flag.parent.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with (self.flag.parent / ".turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def wait_for_all(self) -> None:
        self.flag.touch()
        end = time.monotonic() + PATIENCE_SECONDS
        while len([each for each in self.flag.parent.iterdir() if each.name != ".turn"]) < self.of:
            if time.monotonic() > end:
                say("the others are not ready: measured while they compile")
                return
            time.sleep(0.2)


class TorchEnsemble:
    """diffusers' base and refiner, called as sdflow's are."""

    def __init__(self, base: Any, refiner: Any) -> None:
        self.base, self.refiner, self.unet = base, refiner, base.unet

    def begin(self, prompt: str, *, refiner_start: float, **more: Any) -> Any:
        return self.base(prompt, denoising_end=refiner_start, **(more | {"output_type": "latent"})).images

    def __call__(self, prompt: str, *, refiner_start: float, **more: Any) -> Any:
        latents = self.begin(prompt, refiner_start=refiner_start, **more)
        both = {key: more[key] for key in ("num_inference_steps", "generator", "output_type")}
        return self.refiner(prompt, image=latents, denoising_start=refiner_start, **both)


def parts_of(pipeline: Any) -> list[Any]:
    return [pipeline.base, pipeline.refiner] if isinstance(pipeline, TorchEnsemble) else [pipeline]


def load(graphs: Path, device: str) -> Any:
    """diffusers' pipeline, with a refiner's where there is one, in float32."""
    from sdflow.manifest import read_manifest
    from sdflow.sources import PlainDigests, reopen_checkpoint
    from sdflow.sources.load import load_pipeline

    checkpoint = reopen_checkpoint(read_manifest(graphs).origin, str(graphs), digests=PlainDigests())
    pipeline = load_pipeline(checkpoint).to(device)
    if getattr(pipeline, "safety_checker", None) is not None:
        pipeline.safety_checker = None  # it is not run on the other side
    pipeline.set_progress_bar_config(disable=True)
    if not (graphs / REFINER).is_dir():
        return pipeline
    import diffusers

    parts = load(graphs / REFINER, device).components
    # As diffusers' documentation loads it.
    shared = {name: getattr(pipeline, name) for name in ("text_encoder_2", "vae")}
    refiner = diffusers.StableDiffusionXLImg2ImgPipeline(
        **(parts | shared), requires_aesthetics_score=True, force_zeros_for_empty_prompt=False
    )
    refiner.set_progress_bar_config(disable=True)
    return TorchEnsemble(pipeline, refiner)


def draw(pipeline: Any, given: dict[str, Any], *, only_base: bool = False, **changed: Any) -> Any:
    """The image, as an array. changed: arguments in place of the call's."""
    from PIL import Image

    more: dict[str, Any] = {}
    if len(given["control"]):
        more["image"] = [Image.fromarray(each) for each in given["control"]]
    if len(given["shown"]):  # at a scale of 0 too: diffusers takes no call without one
        more["ip_adapter_image"] = [Image.fromarray(each) for each in given["shown"]]
    call = json.loads(str(given["call"])) | changed
    latents = torch.from_numpy(given["latents"]).to(pipeline.unet.device, pipeline.unet.dtype)
    run = pipeline.begin if only_base else pipeline
    generator = torch.Generator().manual_seed(0)
    made = run(PROMPT, latents=latents, generator=generator, output_type="np", **call, **more)
    return made if only_base else made.images


def cloned(outputs: Any) -> Any:
    """The outputs in memory of their own: those of a captured graph are overwritten when the next graph runs."""
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    if isinstance(outputs, dict):  # transformers' and diffusers' outputs are dataclasses that are dictionaries
        return type(outputs)(**{key: cloned(value) for key, value in outputs.items()})
    return type(outputs)(map(cloned, outputs)) if isinstance(outputs, (tuple, list)) else outputs


def compile_method(module: Any, method: str, what: str) -> None:
    """Compile a method in place, and say how long its first run takes."""
    run = torch.compile(getattr(module, method), mode="reduce-overhead", fullgraph=True, dynamic=False)
    seen = False

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        begun = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        outputs = cloned(run(*arguments, **named))
        if not seen:
            synchronize()
            say(f"  {what}: first run {time.perf_counter() - begun:.0f} s")
            seen = True
        return outputs

    setattr(module, method, call)


def decode_in_own_type(vae: Any) -> None:
    """A VAE that needs float32 stays in it: diffusers would cast it there and back for each image."""
    decode = vae.decode
    vae.decode = lambda latents, *arguments, **named: decode(latents.to(vae.dtype), *arguments, **named)


def prepare(pipeline: Any, options: argparse.Namespace) -> None:
    """From float32, to how it is run."""
    from sdflow.bench.draw_functions import with_float32_noise

    half = torch.float16 if options.device == "cuda" else torch.float32
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    decoders: list[Any] = []
    for which, each in enumerate(parts_of(pipeline)):
        each.scheduler.step = with_float32_noise(each.scheduler.step)
        exact = getattr(each.vae.config, "force_upcast", False)
        each.to(half)
        if exact:
            each.vae.to(torch.float32)
        nets = getattr(each, "controlnet", None)
        drawing = [each.unet, *getattr(nets, "nets", [nets] if nets is not None else [])]
        for index, module in enumerate(drawing):
            module.to(memory_format=torch.channels_last)
            if options.compile:
                if not module.config.get("encoder_hid_dim_type"):  # the processors of image prompts stay
                    module.fuse_qkv_projections()
                compile_method(module, "forward", f"{type(module).__name__} {which}.{index}")
        if each.vae in decoders:
            continue
        decoders.append(each.vae)
        each.vae.to(memory_format=torch.channels_last)
        if options.compile:
            each.vae.fuse_qkv_projections()
            compile_method(each.vae, "decode", f"decoder {which}")
        decode_in_own_type(each.vae)


def measure(options: argparse.Namespace, turn: Turn) -> None:
    import numpy as np

    from sdflow.distance import psnr

    begun = time.perf_counter()
    kept = sorted(options.drawn.glob(f"{options.name}-*.npz"))
    if not kept:
        raise SystemExit(f"{options.drawn}: nothing of {options.name}")
    calls = [dict(np.load(file)) for file in kept]
    torch.backends.cudnn.allow_tf32 = False
    pipeline = load(options.graphs / options.name, "cpu")
    said = "compiled" if options.compile else "eager"
    say(f"{options.name}, {said}: loaded in {time.perf_counter() - begun:.0f} s, process {os.getpid()}")
    with turn.alone():
        for each in parts_of(pipeline):
            each.to(options.device)
            if hasattr(each, "set_ip_adapter_scale") and len(calls[0]["shown"]):
                each.set_ip_adapter_scale([float(calls[0]["scale"])] * len(calls[0]["shown"]))
        expected = [draw(pipeline, given) for given in calls]
        prepare(pipeline, options)
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    for given, right in zip(calls, expected, strict=True):
        say(
            f"{options.name} {given['call']}: sdflow {distance(given['drawn'], right):.4f} relative L2 to float32, "
            f"{psnr(given['drawn'], right):.1f} dB; spread {float(right.std()):.3f}"
        )
    few = {"num_inference_steps": WARM_UP_STEPS} if isinstance(pipeline, TorchEnsemble) else {}
    begun = time.perf_counter()
    for given in calls:
        if few:  # a part by itself, as soon as it is known
            for _ in range(3):
                draw(pipeline, given, only_base=True, **few)
            say(
                f"  base alone, {said}: {milliseconds(lambda given=given: draw(pipeline, given, only_base=True), 3):.1f} ms"
            )
        for _ in range(3):
            draw(pipeline, given, **few)
    say(f"{options.name}, {said}: ready after {time.perf_counter() - begun:.0f} s")
    turn.wait_for_all()
    with turn.alone():
        for given, right in zip(calls, expected, strict=True):
            half = draw(pipeline, given)
            took = milliseconds(lambda given=given: draw(pipeline, given), options.rounds)
            say(
                f"{options.name} {given['call']}: float16 PyTorch, {said}: {took:.1f} ms; "
                f"{distance(half, right):.4f}, {psnr(half, right):.1f} dB"
            )
        if options.device == "cuda":
            reserved = torch.cuda.max_memory_reserved() / 1e9
            say(
                f"{options.name}, {said}: device memory {reserved:.2f} GB beside a context's; in use by all {used():.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("drawn", type=Path)
    parser.add_argument("name")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--of", type=int, default=1)
    options = parser.parse_args()
    turn = Turn(options.turn or options.drawn / ".turns" / options.name, options.of)
    with torch.no_grad():
        measure(options, turn)


if __name__ == "__main__":
    main()
