"""Measure sdflow's device memory for an image by stage, and what each option saves.

    python benchmarks/gpu/device_memory.py GRAPHS [--steps 10] [--variant NAME ...]

GRAPHS: as for benchmarks/gpu/image_latency.py. Weights are created once. Each variant runs in a separate process and
prints the total memory in use on the device, minus what was in use right after it created its CUDA context.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights of each session": {"own_weights": True},
    "trial run's workspaces kept": {"kept": True},
    "cuBLAS workspaces of 32 MB": {"environment": {"CUBLAS_WORKSPACE_CONFIG": ":32768:1"}},
    "cuBLAS workspaces of 4 MB, torch's too": {"environment": {"CUBLAS_WORKSPACE_CONFIG": ":4096:1"}},
}


def companions(graphs: Path) -> dict[str, Any]:
    import diffusers
    from transformers import CLIPTokenizer

    from sdflow.sources.architectures import architecture_config, companion_folder

    own = graphs / "tokenizer"
    return {
        "tokenizer": CLIPTokenizer.from_pretrained(own if own.is_dir() else companion_folder("sd15", "tokenizer")),
        "scheduler": diffusers.DDIMScheduler.from_config(architecture_config("sd15", "scheduler")),
    }


def one(graphs: Path, folder: Path, steps: int, chosen: dict[str, Any]) -> None:
    """One variant: memory after each stage, then the time of a step, of the decoder and of an image."""
    import torch

    from benchmarks.gpu.image_latency import PROMPT, SUBMODELS, Machine
    from sdflow.families import FAMILIES
    from sdflow.families.shared.request import Request
    from sdflow.runtime.files.folder import load_submodel
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.runtime.sessions.bound import Bound
    from sdflow.runtime.sessions.device_weights import DeviceWeights
    from sdflow.runtime.sessions.session import LoadOptions
    from sdflow.runtime.sessions.tuning import Tuning
    from sdflow.targets import TARGETS

    os.environ.update(chosen.pop("environment", {}))
    torch.zeros(1, device="cuda")
    if chosen.pop("own_weights", False):
        DeviceWeights.of = lambda self, graph: {}  # type: ignore[method-assign]
    if chosen.pop("kept", False):
        Bound._prepare = lambda self: None  # type: ignore[method-assign]
    machine = Machine("cuda")
    start, last = machine.used(), [machine.used()]

    def stage(name: str) -> None:
        machine.wait()
        now = machine.used()
        print(f"    {name:42} {now - last[0]:+6.2f}  in all {now - start:5.2f} GB", flush=True)
        last[0] = now

    options = LoadOptions(tuning=Tuning(**chosen))
    submodels = {
        name: load_submodel(folder, name, TARGETS["cuda"], cuda_graphs=tuple(SUBMODELS), lazy=True, options=options)
        for name in SUBMODELS
    }
    pipeline = Pipeline(FAMILIES["stable_diffusion"], submodels, companions(graphs))
    latents = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(7))
    with pipeline.place.current():
        pipeline.submodels["text_encoder"].bound(input_ids=(2, 77))
        stage("text encoder loaded")
        conditions = pipeline.condition(Request([PROMPT], None, 7.5, 512, 512))
        stage("text encoded")
        decoder = pipeline.submodels["vae_decoder"].bound(latent_sample=(1, 4, 64, 64))
        stage("decoder loaded")
        decoder.run()
        stage("decoded")
        from sdflow.runtime.denoiser.denoiser import DenoiserInputs

        unet, noise = pipeline.denoiser(tuple(latents.shape), 2), latents.to("cuda")
        stage("UNet loaded")
        inputs = DenoiserInputs(conditions.inputs, pipeline.schedule(steps, latents.shape, guidance_scale=7.5))
        unet.run(inputs, noise, 0)
        stage("text, timesteps and a step")

    def draw() -> None:
        pipeline(PROMPT, num_inference_steps=steps, latents=latents, output_type="np")

    draw()
    stage("an image")
    print(
        f"    torch: {torch.cuda.memory_reserved() / 1e9:.2f} GB reserved, {torch.cuda.memory_allocated() / 1e9:.2f} used"
    )

    def on_stream(run: Any, count: int = 20) -> float:
        def many() -> None:
            with pipeline.place.current():
                for _ in range(count):
                    run()

        many()
        return min(machine.milliseconds(many) for _ in range(3)) / count

    drawn = pipeline(PROMPT, num_inference_steps=steps, latents=latents, output_type="np").images
    print(f"    mean {drawn.mean():.6f}, deviation {drawn.std():.6f}")
    print(
        f"    step {on_stream(lambda: unet.run(inputs, noise, 0)):.2f} ms, decoder {on_stream(decoder.run):.2f} ms, "
        f"image of {steps} steps {min(machine.milliseconds(draw) for _ in range(5)):.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        one(options.graphs, options.folder, options.steps, json.loads(options.child))
        return
    from benchmarks.gpu.image_latency import SUBMODELS, bind, modules

    with tempfile.TemporaryDirectory() as folder:
        made = modules(options.graphs, "cpu")
        for name, component in SUBMODELS.items():
            bind(options.graphs / name, made[component].state_dict(), Path(folder) / name)
        del made
        for name in options.variant or VARIANTS:
            print(f"--- {name}", flush=True)
            began = time.perf_counter()
            command = [sys.executable, __file__, str(options.graphs), "--steps", str(options.steps)]
            command += ["--child", json.dumps(VARIANTS[name]), "--folder", folder]
            status = subprocess.run(command, env=os.environ, check=False).returncode
            print(f"    status {status}, {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
