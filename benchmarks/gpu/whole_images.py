"""Compare whole images of a transformer, and their parts, in turns: sdflow against PyTorch with all parts compiled.

    python benchmarks/gpu/whole_images.py WEIGHTS NAME [--beside NAME ...] [--float8 NAME] [--dtype bfloat16] [--steps 4]
        [--guidance 1] [--images 1 4] [--size N] [--keep fit] [--attention cudnn] [--decoder-only] [--rounds 5] [--processes 1]
        [--lock FILE] [--graphs DIR] [--json FILE] [--target cpu]

WEIGHTS/NAME: output of benchmarks/gpu/with_weights.py; --processes, --lock, --graphs as in beside_float32.py. PyTorch
is diffusers' own pipeline in --dtype with the same weights, with compiled repeated transformer blocks (fullgraph), text
encoder layers and decoder, in channels last. Rows: an image, a batch, a step (PyTorch's also in a captured graph), a
prompt through the largest text encoder, the decoder. Then an image and a step of other pipelines of the same
checkpoint: --beside against the same PyTorch, --float8 against PyTorch with the denoiser's large Linears in float8
(float8_linear.py). --dtype float8: NAME is such a pipeline, and nothing else is measured. Distances: of one image from
float32 PyTorch (TensorFloat-32 off), which runs first. Memory: what the driver's figure for the process grows by, for
PyTorch in addition to its weights. --attention cudnn: PyTorch may not choose another kernel; the profiles show which
one it takes by itself. --decoder-only: that row alone, without an image. `--target cpu` is to try it without compiling.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # before ONNX Runtime

from benchmarks.gpu.beside_float32 import arguments_of, begin, parser_of, weights_gb
from benchmarks.gpu.compiled_blocks import FLOAT8, captured, compile_blocks, halves_of, our_run, profiled
from benchmarks.gpu.float8_linear import quantize
from benchmarks.gpu.in_turns import in_turns
from benchmarks.gpu.pipelines_on_gpu import PROMPT, distance, own_gigabytes, say, synchronize
from benchmarks.gpu.unattended import Results, device_alone, wait_for

Runs = list[tuple[str, str, Callable[[], Any]]]
IMAGES_IN_A_ROW, PARTS_IN_A_ROW = 3, 10
COMPILATIONS = 64
"""Compiled variants of one function: the layers of a text encoder differ in what its hooks hold."""


def compile_layers(module: torch.nn.Module) -> int:
    """Compile the layers of a text encoder in place, wherever its list of them is; how many. Not as full graphs: transformers'
    hooks, which collect hidden states, break them."""
    lists = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList) and len(each) > 1]
    layers = max(lists, key=len)
    for each in layers:
        each.compile(dynamic=False)
    return len(layers)


def only_cudnn_attention() -> None:
    """PyTorch's attention by cuDNN, or by plain operators where cuDNN cannot."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


class Comparison:
    """Both engines with one checkpoint. theirs: diffusers' pipeline, first in float32 on the host. ours: sdflow's that is
    loaded. step: PyTorch's denoiser with the arguments of its last step."""

    def __init__(self, options: Any, results: Results, theirs: Any, checkpoint: Any) -> None:
        self.options, self.results, self.theirs, self.checkpoint = options, results, theirs, checkpoint
        self.family, self.device = checkpoint.family, options.target
        self.kind = halves_of(options.dtype)
        self.what = self.family.latents({name: each.load["config"] for name, each in checkpoint.submodels.items()})
        self.size = options.size or self.what.image_size
        self.call = {
            "height": self.size, "width": self.size, "num_inference_steps": options.steps,
            "guidance_scale": options.guidance,
        }  # fmt: skip
        self.ours: Any = None
        self.step: Callable[[], Any] | None = None
        self.reference: Any = None
        self.found = results.found
        self.found |= {
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "torch_version": torch.__version__,
            "call": self.call,
            "attention": options.attention,
            **{key: {} for key in ("memory_gb", "first_s", "distances", "ms", "profiles")},
        }

    def latents(self, images: int) -> torch.Tensor:
        """Noise, drawn once: on one core it takes 2 ms for an image of 1024 pixels, which a call would draw."""
        return self.noise[:images]

    @cached_property
    def noise(self) -> torch.Tensor:
        side = self.size // self.what.scale
        shape = (max(self.options.images), self.what.channels, side, side)
        return torch.randn(shape, generator=torch.Generator().manual_seed(7))

    @property
    def transformer(self) -> torch.nn.Module:
        return self.module(self.family.denoiser)

    def module(self, name: str) -> torch.nn.Module:
        """PyTorch's module of a submodel."""
        module: torch.nn.Module = getattr(self.theirs, self.family.part(name).component)
        return module

    def components(self) -> dict[str, torch.nn.Module]:
        """PyTorch's modules by attribute; the VAE's halves are one."""
        names = {self.family.part(name).component for name in self.checkpoint.submodels}
        return {name: getattr(self.theirs, name) for name in sorted(names)}

    def draw_ours(self, images: int) -> Any:
        return self.ours([PROMPT] * images, latents=self.latents(images), output_type="np", **self.call).images

    def draw_theirs(self, images: int, kind: torch.dtype) -> Any:
        given = self.family.packed(self.latents(images)).to(self.device, kind)
        return self.theirs(
            prompt=[PROMPT] * images, latents=given, output_type="np", **self.call, **arguments_of(self.checkpoint)
        ).images

    def compute_reference(self) -> None:
        """One image by float32 PyTorch; then its modules become 16 bits in place."""
        self.theirs.set_progress_bar_config(disable=True)
        for module in self.components().values():
            module.to(self.device)
        self.reference = self.draw_theirs(1, torch.float32)
        self.to_half()

    def to_half(self) -> None:
        """PyTorch's modules to 16 bits on the device, in place."""
        for name, submodel in self.checkpoint.submodels.items():
            model = self.family.part(name).of(submodel.load["config"]).model
            model.to_half(self.module(name).to(self.device), self.kind)
        self.empty()

    def empty(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def load_ours(self, name: str, label: str, batches: list[int]) -> None:
        from sdflow.runtime.pipeline import Pipeline

        folder = self.options.weights / name
        if self.options.graphs is not None:
            wait_for(folder)
        self.ours = None
        self.empty()
        before, begun = own_gigabytes(), time.perf_counter()
        self.ours = Pipeline.load(folder, self.device, checker=False, keep=self.options.keep)
        for images in batches:
            self.note("sdflow", label, images, self.draw_ours(images), before, begun)

    def quantize(self) -> None:
        """The large Linears of PyTorch's denoiser to float8, in place."""
        say(f"PyTorch, float8: {quantize(self.transformer)} layers")

    def compile(self) -> None:
        """Every part of PyTorch's pipeline, where that is a GPU."""
        texts = [self.module(name) for name in self.family.text_of(self.checkpoint.submodels)]
        for each in texts:
            if getattr(each.config, "use_cache", False):
                each.config.use_cache = False  # a prompt is read once; its caches would compile each layer anew
        if self.device == "cuda":
            torch._dynamo.config.recompile_limit = COMPILATIONS
            self.theirs.vae.to(memory_format=torch.channels_last)
            self.theirs.vae.decoder.compile(dynamic=False)
            layers = [compile_layers(each) for each in texts]
            say(f"compiled: {compile_blocks(self.transformer)} blocks, {layers} layers, the decoder")

    def draw_all_of_torch(self, label: str, batches: list[int]) -> None:
        weights = sum(map(weights_gb, self.components().values()))
        self.empty()
        before, begun = own_gigabytes() - weights, time.perf_counter()
        calls: list[tuple[Any, Any]] = []
        hook = self.transformer.register_forward_pre_hook(
            lambda module, positional, named: calls.append((positional, named)), with_kwargs=True
        )
        for images in batches:
            drawn = [self.draw_theirs(images, self.kind) for _ in range(2)][-1]
            if images == 1:
                self.step = partial(self.transformer, *calls[-1][0], **calls[-1][1])
            self.note("torch", label, images, drawn, before, begun)
        hook.remove()

    def note(self, engine: str, label: str, images: int, drawn: Any, before: float, begun: float) -> None:
        """What the first images of an engine say."""
        key = f"{engine}, {label}"
        self.found["first_s"].setdefault(key, time.perf_counter() - begun)
        self.found["memory_gb"][f"{key}, {images}"] = own_gigabytes() - before
        self.found["distances"][f"{key}, {images}"] = distance(drawn[:1], self.reference)
        self.results.note()

    def image_runs(self, label: str, batches: list[int]) -> Runs:
        return [
            run
            for images in batches
            for run in (
                (f"images: {images}, {label}", "sdflow", partial(self.draw_ours, images)),
                (f"images: {images}, {label}", "torch", partial(self.draw_theirs, images, self.kind)),
            )
        ]

    def step_runs(self, label: str) -> Runs:
        assert self.step is not None
        runs = [
            (f"step, {label}", "sdflow", our_run(self.ours, PROMPT, self.latents(1), self.call)),
            (f"step, {label}", "torch", self.step),
        ]
        if self.device == "cuda":
            with self.results.part(f"PyTorch's step in a captured graph, {label}"):
                runs.append((f"step, {label}", "torch, captured", captured(self.step)))
        return runs

    def text_runs(self) -> Runs:
        """The largest text encoder on a prompt of its length."""
        family = self.family
        name = max(family.text_of(self.checkpoint.submodels), key=lambda name: weights_gb(self.module(name)))
        module, submodel = self.module(name), self.ours.submodels[name]
        bound = submodel.bound(**submodel.shapes({"batch": 1, **self.ours.family.token_sizes(self.ours.configs)}))
        with self.ours.place.current():
            for value in bound.inputs.values():
                value.fill_(1)
        given = {key: value.clone() for key, value in bound.inputs.items()}
        model = family.part(name).of(submodel.config).model
        what = f"{name}, {max(value.shape[-1] for value in given.values())} tokens"
        return [
            (what, "sdflow", self.on_our_stream(bound.run)),
            (what, "torch", partial(model.reference, module, given)),
        ]

    def decoder_runs(self) -> Runs:
        decoder, side = self.ours.submodels[self.family.decoder], self.size // self.what.scale
        model = self.family.part(self.family.decoder).of(decoder.config).model
        (port,) = model.ports(decoder.config).inputs
        bound = decoder.bound(**decoder.shapes({"batch": 1, "latent_height": side, "latent_width": side}))
        given = torch.randn(tuple(bound.inputs[port.name].shape), generator=torch.Generator().manual_seed(3))
        with self.ours.place.current():
            bound.inputs[port.name].copy_(given)
        theirs = given.to(self.device, self.kind).to(memory_format=torch.channels_last)
        return [
            ("decoder", "sdflow", self.on_our_stream(bound.run)),
            ("decoder", "torch", partial(model.reference, self.theirs.vae, {port.name: theirs})),
        ]

    def on_our_stream(self, run: Callable[[], Any]) -> Callable[[], None]:
        def on_stream() -> None:
            with self.ours.place.current():
                run()

        return on_stream

    def time(self, what: str, runs: Runs, in_a_row: int) -> None:
        with self.results.part(f"in turns: {what}"):
            self.found["ms"] |= in_turns(runs, self.options.rounds, in_a_row)

    def compare(self, name: str, label: str, batches: list[int], more: Callable[[], Runs] | None = None) -> None:
        """All rows of a pipeline, PyTorch's modules being as they are to be compared with it. more: further parts."""
        with self.results.part(f"sdflow, {label}"):
            self.load_ours(name, label, batches)
        with self.results.part(f"PyTorch, {label}"):
            self.draw_all_of_torch(label, batches)
        self.time(f"images, {label}", self.image_runs(label, batches[:1]), IMAGES_IN_A_ROW)
        with self.results.part(f"steps, {label}"):
            steps = self.step_runs(label)
            self.time(f"a step, {label}", steps, PARTS_IN_A_ROW)
            if self.device == "cuda":
                self.found["profiles"] |= profiled({f"{engine}, {label}": run for _, engine, run in steps[:2]})
        if more is not None:
            with self.results.part("the parts"):
                self.time("the parts", more(), PARTS_IN_A_ROW)
        for images in batches[1:]:
            self.time(f"{images} images, {label}", self.image_runs(label, [images]), 1)

    def parts(self) -> Runs:
        return self.text_runs() + self.decoder_runs()


def measure(options: Any, results: Results, loaded: list[Any], checkpoint: Any) -> None:
    both = Comparison(options, results, loaded.pop(), checkpoint)
    if options.decoder_only:
        both.to_half()
        both.compile()
        with results.part(f"sdflow, {options.dtype}"):
            both.load_ours(options.name, options.dtype, [])
        both.time("the decoder", both.decoder_runs(), PARTS_IN_A_ROW)
        table(results.found)
        return
    with results.part("an image in float32"):
        both.compute_reference()
    if results.failed:
        return
    if options.attention == "cudnn":
        only_cudnn_attention()
    if options.dtype == FLOAT8:
        both.quantize()
    both.compile()
    both.compare(options.name, options.dtype, options.images, both.parts)
    for name in options.beside:
        both.compare(name, name, options.images[:1])
    if options.float8 is not None:
        both.quantize()
        both.compare(options.float8, FLOAT8, options.images[:1])
    table(results.found)


def table(found: dict[str, Any]) -> None:
    for row, engines in found["ms"].items():
        median = {engine: statistics.median(times) for engine, times in engines.items()}
        told = ", ".join(f"{engine} {each:8.2f} ms" for engine, each in median.items())
        say(f"{row:30} {told}: {median['sdflow'] / median['torch']:.3f} of torch")
    for key in ("memory_gb", "first_s", "distances"):
        say(f"{key}: " + "; ".join(f"{name} {value:.4g}" for name, value in found[key].items()))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name")
    parser.add_argument("--beside", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--float8", metavar="NAME")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", FLOAT8))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4], help="batches, one image first")
    parser.add_argument("--size", type=int)
    parser.add_argument("--keep", choices=("all", "fit"), default="all")
    parser.add_argument("--attention", choices=("default", "cudnn"), default="default")
    parser.add_argument("--decoder-only", action="store_true")
    options = parser.parse_args()
    if options.images[0] != 1:
        parser.error("--images: the first is 1")
    torch.set_grad_enabled(False)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    results, checkpoint, loaded = begin(options, options.name)
    with device_alone(options.lock):
        synchronize()
        measure(options, results, loaded, checkpoint)
    sys.exit(results.failed)


if __name__ == "__main__":
    main()
