"""Compare the latency of whole images in one process: sdflow, eager PyTorch and torch.compile.

    python benchmarks/gpu/image_latency.py GRAPHS [--device cuda] [--images 1 8] [--steps 50] [--rounds 5]
        [--engines sdflow eager compile]

GRAPHS: a folder with the structures of text_encoder, unet and vae_decoder (a graph without weights, `parameters.json`,
`config.json`): what the step before BindWeights leaves in the cache, some 700 KB for Stable Diffusion 1.5; and the
tokenizer, unless it is CLIP's. Weights are random, seeded and rounded to float16; every engine gets the same weights
and latents. Engines alternate image by image. Every image is compared with float32 PyTorch's. Needs torch, diffusers,
transformers, onnx and ONNX Runtime. Failures are printed in full and skipped.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

PROMPT = "a photo of an astronaut riding a horse on mars"
SUBMODELS = {"text_encoder": "text_encoder", "unet": "unet", "vae_decoder": "vae"}
Draw = Callable[[int], Any]


def say(*words: object) -> None:
    print(*words, flush=True)


@contextmanager
def part(name: str) -> Iterator[None]:
    """One part of the run: its time, and its error in full if it fails."""
    begun = time.perf_counter()
    try:
        yield
    except Exception:  # noqa: BLE001  what one engine cannot do must not end the others' run
        say(f"--- {name} failed\n{traceback.format_exc()}")
    say(f"[{time.perf_counter() - begun:.1f} s] {name}")


class Machine:
    """The device: waiting for it, and how much of its memory is in use."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.dtype = torch.float16 if device == "cuda" else torch.float32

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def used(self) -> float:
        """GB in use on the device, by anybody."""
        if self.device != "cuda":
            return float("nan")
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e9

    def milliseconds(self, run: Callable[[], object]) -> float:
        self.wait()
        begun = time.perf_counter()
        run()
        self.wait()
        return (time.perf_counter() - begun) * 1e3


def fill_at_random(module: Any, generator: Any, device: str) -> None:
    """Random weights that float16 holds exactly."""
    module.eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        if "embedding.weight" in name:
            value = 0.02 * noise
        elif parameter.dim() > 1:
            value = noise / sqrt(prod(parameter.shape[1:]))
        else:
            value = 0.05 * noise if name.endswith("bias") else 1 + 0.1 * noise
        parameter.copy_(value.half().float())


def modules(graphs: Path, device: str) -> dict[str, Any]:
    """PyTorch modules in float32 with random weights that float16 holds exactly."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel

    configs = {name: json.loads((graphs / name / "config.json").read_text()) for name in SUBMODELS}
    with torch.device(device):
        made = {
            "text_encoder": CLIPTextModel(CLIPTextConfig(**configs["text_encoder"])),
            "unet": diffusers.UNet2DConditionModel.from_config(configs["unet"]),
            "vae": diffusers.AutoencoderKL.from_config(configs["vae_decoder"]),
        }
    generator = torch.Generator(device).manual_seed(0)
    for module in made.values():
        fill_at_random(module, generator, device)
    return made


def session_of(part: Any) -> Any:
    """Of a part of a denoiser: bound by itself, or as one of the sessions of a step."""
    return getattr(part, "whole", part).session


def bind(structure: Path, state: dict[str, torch.Tensor], out: Path) -> None:
    """model.onnx with its weights, each by its recipe, from a state dict."""
    import numpy as np
    import onnx

    from sdflow.onnx_model.files import initializers_and_constants, raw_values, set_external
    from sdflow.weights.evaluate import evaluate
    from sdflow.weights.structure import read_parameters, read_recipe

    def read(key: str) -> Any:
        names = (key, f"text_model.{key}", key.removeprefix("text_model."))
        return state[next(name for name in names if name in state)].float().cpu().numpy()

    model = onnx.load(str(structure / "model.onnx"), load_external_data=False)
    parameters = read_parameters(structure)
    jobs = []
    for tensor, movable in initializers_and_constants(model):
        recipe = read_recipe(tensor, parameters, str(structure))
        if recipe is not None:
            jobs.append((tensor, movable, recipe))
        elif any(entry.key == "location" for entry in tensor.external_data):
            tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims,
                                             raw_data=raw_values(tensor, structure)))  # fmt: skip
    out.mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool, (out / "model.onnx.data").open("wb") as data:
        values = pool.map(lambda job: np.ascontiguousarray(evaluate(job[2], read)), jobs)
        for (tensor, movable, _), array in zip(jobs, values, strict=True):
            if movable and array.nbytes >= 1024:
                set_external(tensor, "model.onnx.data", data.tell(), array.nbytes)
                data.write(array.tobytes())
            else:
                tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims,
                                                 raw_data=array.tobytes()))  # fmt: skip
    (out / "model.onnx").write_bytes(model.SerializeToString())
    shutil.copyfile(structure / "config.json", out / "config.json")


class Bench:
    """The engines and what they measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.machine = Machine(options.device)
        self.torch_modules: dict[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="image-latency-"))
        self.engines: dict[str, Draw] = {}
        self.parts: dict[str, dict[str, Callable[[], object]]] = {}
        self.reference: Any = None

    def companions(self) -> dict[str, Any]:
        import diffusers
        from transformers import CLIPTokenizer

        from sdflow.sources.architectures import architecture_config, companion_folder

        own = self.options.graphs / "tokenizer"
        return {
            "tokenizer": CLIPTokenizer.from_pretrained(own if own.is_dir() else companion_folder("sd15", "tokenizer")),
            "scheduler": diffusers.DDIMScheduler.from_config(architecture_config("sd15", "scheduler")),
        }

    def latents(self, images: int) -> torch.Tensor:
        config = self.torch_modules["unet"].config
        size = self.options.size // 8 if self.options.size else config.sample_size
        return torch.randn(images, config.in_channels, size, size, generator=torch.Generator().manual_seed(7))

    def settings(self, images: int) -> dict[str, Any]:
        return {"num_inference_steps": self.options.steps, "guidance_scale": 7.5, "latents": self.latents(images)}

    def add_torch(self, name: str, dtype: torch.dtype, *, compiled: bool = False) -> None:
        import diffusers

        parts = {key: copy.deepcopy(module).to(dtype) for key, module in self.torch_modules.items()}
        if dtype == torch.float16:
            for key in ("unet", "vae"):
                parts[key] = parts[key].to(memory_format=torch.channels_last)
        pipeline: Any = diffusers.StableDiffusionPipeline(
            **parts, **self.companions(), safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
        pipeline.set_progress_bar_config(disable=True)
        if compiled:
            pipeline.unet = torch.compile(pipeline.unet, mode="reduce-overhead", fullgraph=True, dynamic=False)
            pipeline.vae.decode = torch.compile(
                pipeline.vae.decode, mode="reduce-overhead", fullgraph=True, dynamic=False
            )

        def draw(images: int) -> Any:
            settings = self.settings(images)
            settings["latents"] = settings["latents"].to(self.machine.device, dtype)
            return pipeline([PROMPT] * images, output_type="np", **settings).images

        self.engines[name] = draw
        sample = self.latents(1).to(self.machine.device, dtype)
        text = torch.randn(2, 77, parts["unet"].config.cross_attention_dim, device=self.machine.device, dtype=dtype)
        step = torch.tensor(500.0, device=self.machine.device)

        def run_unet() -> None:
            with torch.no_grad():
                pipeline.unet(torch.cat([sample, sample]), step, encoder_hidden_states=text, return_dict=False)

        def run_decoder() -> None:
            with torch.no_grad():
                pipeline.vae.decode(sample, return_dict=False)

        self.parts[name] = {"unet step": run_unet, "decoder": run_decoder}

    def add_sdflow(self) -> None:
        from sdflow.families import FAMILIES
        from sdflow.runtime.files.folder import load_submodel
        from sdflow.runtime.pipeline import Pipeline
        from sdflow.targets import TARGETS

        for name, component in SUBMODELS.items():
            with part(f"weights of {name}"):
                bind(self.options.graphs / name, self.torch_modules[component].state_dict(), self.folder / name)
        target = TARGETS["cuda" if self.machine.device == "cuda" else "cpu"]
        failure: Exception | None = None
        for split, captured in ((True, tuple(SUBMODELS)), (False, tuple(SUBMODELS)), (False, ("unet",)), (False, ())):
            try:
                submodels = {
                    name: load_submodel(self.folder, name, target, cuda_graphs=captured, lazy=True)
                    for name in SUBMODELS
                }
                pipeline = Pipeline(FAMILIES["stable_diffusion"], submodels, self.companions(), split=split)

                def draw(images: int, pipeline: Any = pipeline) -> Any:
                    return pipeline([PROMPT] * images, output_type="np", **self.settings(images)).images

                first = self.machine.milliseconds(lambda draw=draw: draw(1))
                say(
                    f"sdflow: UNet {'in parts' if split else 'whole'}, captured {captured}, loaded and drawn in {first:.0f} ms"
                )
                break
            except Exception as error:  # noqa: BLE001  the next try asks for less; the last one's error is raised
                say(f"--- UNet {'in parts' if split else 'whole'}, captured {captured}:\n{traceback.format_exc()}")
                failure = error
        else:
            assert failure is not None
            raise failure
        self.engines["sdflow"] = draw
        self.parts["sdflow"] = self._parts_of(pipeline)

    def _parts_of(self, pipeline: Any) -> dict[str, Callable[[], object]]:
        with pipeline.place.current():
            drawing = pipeline.drawing(PROMPT, **self.settings(1))
            latents = drawing.latents()
        decoder = pipeline.submodels["vae_decoder"].bound(latent_sample=tuple(latents.shape))
        encoder = pipeline.submodels["text_encoder"].bound(input_ids=(2, 77))
        step = partial(drawing.denoiser.run, drawing.inputs, latents, 0)
        runs = {"unet step": step, "decoder": decoder.run, "text encoder": encoder.run}

        def on_stream(run: Callable[[], object]) -> Callable[[], object]:
            def queued() -> None:
                with pipeline.place.current():
                    run()

            return queued

        return {
            **{name: on_stream(run) for name, run in runs.items()},
            "image of one step": lambda: self._without_steps(pipeline),
        }

    def _without_steps(self, pipeline: Any) -> None:
        pipeline(PROMPT, num_inference_steps=1, guidance_scale=7.5, latents=self.latents(1))

    def measure_parts(self) -> None:
        for name, parts in self.parts.items():
            for which, run in parts.items():
                with part(f"{name}, {which}"):
                    for _ in range(3):
                        run()
                    # Many in a row, waited for once: what the loop sees.
                    count = 20 if self.machine.device == "cuda" else 3
                    together = self.machine.milliseconds(lambda run=run, count=count: [run() for _ in range(count)])
                    times = [self.machine.milliseconds(run) for _ in range(count)]
                    say(
                        f"{name:8} {which:26} {together / count:9.2f} ms in a row, {statistics.median(times):9.2f} alone"
                    )

    def measure_images(self, images: int) -> None:
        say(f"\n{images} image(s), {self.options.steps} steps")
        ready = []
        for name, draw in self.engines.items():
            with part(f"{name}: first"):
                first = self.machine.milliseconds(lambda draw=draw: draw(images))
                drawn = draw(images)
                worst = ""
                if self.reference is not None:
                    reference = self.reference[:images]
                    error = ((drawn[: len(reference)] - reference) ** 2).sum() / (
                        (reference - reference.mean()) ** 2
                    ).sum()
                    worst = f", relative L2 to float32 {sqrt(float(error)):.4f}"
                say(f"{name:8} first {first:9.1f} ms, device memory now {self.machine.used():.2f} GB{worst}")
                ready.append(name)
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(self.options.rounds if images == 1 else max(3, self.options.rounds // 2)):
            for name in ready:
                times[name].append(self.machine.milliseconds(lambda name=name: self.engines[name](images)))
            say("  ", {name: round(values[-1], 1) for name, values in times.items()})
        say(f"{'engine':8} {'median':>9} {'p90':>9} {'best':>9}  ms per call; ratio to eager")
        eager = statistics.median(times["eager"]) if times.get("eager") else float("nan")
        for name, values in times.items():
            median = statistics.median(values)
            p90 = sorted(values)[min(len(values) - 1, round(0.9 * len(values)))]
            say(f"{name:8} {median:9.1f} {p90:9.1f} {min(values):9.1f}  {median / eager:.3f}")

    def run(self) -> None:
        torch.backends.cudnn.allow_tf32 = False  # for the reference in float32
        say(f"torch {torch.__version__}, device memory in use {self.machine.used():.2f} GB")
        with part("PyTorch modules"):
            self.torch_modules = modules(self.options.graphs, self.machine.device)
        with part("reference in float32"):
            self.add_torch("float32", torch.float32)
            self.reference = self.engines.pop("float32")(1)
            self.parts.pop("float32")
            say(f"reference: mean {self.reference.mean():.3f}, deviation {self.reference.std():.3f}")
        for name in self.options.engines:
            if self.machine.device == "cuda":
                torch.cuda.empty_cache()  # what an engine before this one no longer needs
            before = self.machine.used()
            with part(f"engine {name}"):
                if name == "sdflow":
                    self.add_sdflow()
                else:
                    self.add_torch(name, self.machine.dtype, compiled=name == "compile")
                    self.engines[name](1)
            say(f"{name}: {self.machine.used() - before:.2f} GB of device memory after its first image, its caches too")
        self.measure_parts()
        for images in self.options.images:
            self.measure_images(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, help="pixels along each side; default: the model's own")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", nargs="+", default=["sdflow", "eager", "compile"])
    bench = Bench(parser.parse_args())
    try:
        bench.run()
    finally:
        shutil.rmtree(bench.folder)


if __name__ == "__main__":
    main()
