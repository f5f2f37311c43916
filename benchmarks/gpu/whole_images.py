"""Compare whole images of a transformer, and their parts, in turns: sdflow against PyTorch with all parts compiled.

    python benchmarks/gpu/whole_images.py WEIGHTS NAME [--dtype bfloat16] [--steps 4] [--guidance 1] [--images 1 4] [--size N]
        [--rounds 5] [--processes 1] [--lock FILE] [--graphs DIR] [--json FILE] [--target cpu]

WEIGHTS/NAME: output of benchmarks/gpu/with_weights.py; --processes, --lock, --graphs as in beside_float32.py. PyTorch
is diffusers' own pipeline in --dtype with the same weights, with compiled repeated transformer blocks (fullgraph), text
encoder layers and decoder, in channels last. Rows: an image, a batch, a prompt through the largest text encoder, the
decoder. Memory: the driver's figure for each, PyTorch's after sdflow's. `--target cpu` is to try it without compiling.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # before ONNX Runtime

from benchmarks.gpu.beside_float32 import arguments_of, begin, parser_of
from benchmarks.gpu.compiled_blocks import compile_blocks
from benchmarks.gpu.in_turns import in_turns
from benchmarks.gpu.pipelines_on_gpu import PROMPT, distance, own_gigabytes, say, synchronize
from benchmarks.gpu.unattended import Results, device_alone, wait_for

Runs = list[tuple[str, str, Callable[[], Any]]]
IN_A_ROW = 3


def compile_layers(module: torch.nn.Module) -> int:
    """Compile the layers of a text encoder in place, wherever its list of them is; how many. Not as full graphs: transformers'
    hooks, which collect hidden states, break them."""
    lists = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList) and len(each) > 1]
    layers = max(lists, key=len)
    for each in layers:
        each.compile(dynamic=False)
    return len(layers)


def as_torch(checkpoint: Any, pipeline: Any, kind: torch.dtype, device: str) -> Any:
    """diffusers' pipeline in 16 bits on the device, every part compiled where that is a GPU."""
    family = checkpoint.family
    modules: dict[str, Any] = {}
    for name, submodel in checkpoint.submodels.items():
        part = family.part(name)
        if part.component not in modules:
            modules[part.component] = module = getattr(pipeline, part.component)
            part.of(submodel.load["config"]).model.to_half(module, kind)
            module.to(device)
    companions = {name: getattr(pipeline, name, None) for name in family.companions}
    half = family.torch_pipeline(modules, companions, checkpoint.options)
    half.set_progress_bar_config(disable=True)
    if device == "cuda":
        half.vae.to(memory_format=torch.channels_last)
        half.vae.decoder.compile(dynamic=False)
        blocks = compile_blocks(modules[family.part(family.denoiser).component])
        layers = [compile_layers(modules[family.part(name).component]) for name in family.text_of(checkpoint.submodels)]
        say(f"compiled: {blocks} blocks, {layers} layers, the decoder")
    return half


def text_runs(checkpoint: Any, ours: Any, theirs: Any) -> Runs:
    """The largest text encoder on a prompt of its length."""
    family = checkpoint.family
    count = lambda name: sum(p.numel() for p in getattr(theirs, family.part(name).component).parameters())  # noqa: E731
    name = max(family.text_of(checkpoint.submodels), key=count)
    module, submodel = getattr(theirs, family.part(name).component), ours.submodels[name]
    sizes = {"batch": 1, **ours.family.token_sizes(ours.configs)}
    bound = submodel.bound(**submodel.shapes(sizes))
    with ours.place.current():
        for value in bound.inputs.values():
            value.fill_(1)
    given = {key: value.clone() for key, value in bound.inputs.items()}
    model = family.part(name).of(submodel.config).model
    tokens = max(value.shape[-1] for value in given.values())

    def run() -> None:
        with ours.place.current():
            bound.run()

    what = f"{name}, {tokens} tokens"
    return [(what, "sdflow", run), (what, "torch", partial(model.reference, module, given))]


def measure(options: Any, results: Results, loaded: list[Any], checkpoint: Any) -> None:
    from sdflow.runtime.pipeline import Pipeline

    pipeline, family, device = loaded.pop(), checkpoint.family, options.target
    kind = getattr(torch, options.dtype)
    what = family.latents({name: each.load["config"] for name, each in checkpoint.submodels.items()})
    size = options.size or what.image_size
    call = {
        "height": size, "width": size, "num_inference_steps": options.steps, "guidance_scale": options.guidance,
    }  # fmt: skip
    found, runs, drawn = results.found, Runs(), dict[tuple[str, int], Any]()
    found |= {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch_version": torch.__version__,
        "call": call,
        "memory_gb": {},
        "first_s": {},
    }

    def latents(images: int) -> torch.Tensor:
        shape = (images, what.channels, size // what.scale, size // what.scale)
        return torch.randn(shape, generator=torch.Generator().manual_seed(7))

    with results.part("sdflow"):
        if device == "cuda":
            torch.zeros(1, device=device)
        if options.graphs is not None:
            wait_for(options.weights / options.name)
        begun, before = time.perf_counter(), own_gigabytes()
        ours = Pipeline.load(options.weights / options.name, device, checker=False, keep="all")

        def draw_ours(images: int) -> Any:
            return ours([PROMPT] * images, latents=latents(images), output_type="np", **call).images

        for images in options.images:
            drawn["sdflow", images] = draw_ours(images)
            found["first_s"].setdefault("sdflow", time.perf_counter() - begun)
            found["memory_gb"][f"sdflow, {images}"] = own_gigabytes() - before
            runs.append((f"images: {images}", "sdflow", partial(draw_ours, images)))
    with results.part("PyTorch"):
        begun, before = time.perf_counter(), own_gigabytes()
        theirs = as_torch(checkpoint, pipeline, kind, device)
        pipeline = None

        def draw_theirs(images: int) -> Any:
            given = family.packed(latents(images)).to(device, kind)
            return theirs(
                prompt=[PROMPT] * images, latents=given, output_type="np", **call, **arguments_of(checkpoint)
            ).images

        for images in options.images:
            for _ in range(2):
                drawn["torch", images] = draw_theirs(images)
            found["first_s"].setdefault("torch", time.perf_counter() - begun)
            found["memory_gb"][f"torch, {images}"] = own_gigabytes() - before
            runs.append((f"images: {images}", "torch", partial(draw_theirs, images)))
            apart = distance(drawn["sdflow", images], drawn["torch", images])
            say(f"{images} images: {apart:.4f} apart (random weights)")
        gc.collect()
    with results.part("the text encoder"):
        runs += text_runs(checkpoint, ours, theirs)
    with results.part("the decoder"):
        decoder = ours.submodels[family.decoder]
        (port,) = family.part(family.decoder).of(decoder.config).model.ports(decoder.config).inputs
        bound = decoder.bound(
            **decoder.shapes({"batch": 1, "latent_height": size // what.scale, "latent_width": size // what.scale})
        )
        given = torch.randn(tuple(bound.inputs[port.name].shape), generator=torch.Generator().manual_seed(3))

        def decode() -> None:
            with ours.place.current():
                bound.run()

        with ours.place.current():
            bound.inputs[port.name].copy_(given)
        their_given = given.to(device, kind).to(memory_format=torch.channels_last)
        decoding = partial(family.part(family.decoder).of(decoder.config).model.reference, theirs.vae)
        runs += [("decoder", "sdflow", decode), ("decoder", "torch", partial(decoding, {port.name: their_given}))]
    with results.part("in turns"):
        found["ms"] = in_turns([each for each in runs if not each[0].startswith("images")], options.rounds, 10)
        found["ms"] |= in_turns([each for each in runs if each[0].startswith("images")], options.rounds, IN_A_ROW)
    for row, engines in found.get("ms", {}).items():
        median = {engine: statistics.median(times) for engine, times in engines.items()}
        say(
            f"{row:30} sdflow {median['sdflow']:8.2f} ms, torch {median['torch']:8.2f}: {median['sdflow'] / median['torch']:.2f}"
        )
    say(f"memory, GB: {found['memory_gb']}; first image, s: {found['first_s']}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--size", type=int)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    results, checkpoint, loaded = begin(options, options.name)
    with device_alone(options.lock):
        synchronize()
        measure(options, results, loaded, checkpoint)
    sys.exit(results.failed)


if __name__ == "__main__":
    main()
