"""Compare pipelines on a GPU with float32 PyTorch, part by part: node placement, distances, and times per step.

    python benchmarks/gpu/beside_float32.py WEIGHTS NAME [NAME ...] [--steps 28] [--guidance 4.5] [--torch bfloat16 float16]
        [--compiled float16 ...] [--profile] [--rounds 5] [--processes 1] [--lock FILE] [--graphs DIR] [--json FILE]
        [--target cpu]

WEIGHTS/NAME: output of benchmarks/gpu/with_weights.py, all of one checkpoint. diffusers' own pipeline runs in float32
(TensorFloat-32 off) with the same weights and initial latents, and the inputs of each submodel are recorded. Each
artifact gets the same inputs. So does PyTorch in the artifact's 16-bit type, which is the yardstick: a whole pipeline
of --torch, or the submodel alone. Then the final latents and the image are compared. PyTorch's float16 and bfloat16
pipelines are measured too, with eager times. `float8` is bfloat16 with the denoiser's large Linears in float8
(float8_linear.py), the yardstick of float8 denoisers. --compiled: also time a step of each, and PyTorch's with compiled
repeated blocks, in turns in one process. --profile: with its kernels. --processes: number of processes that create
random weights. --lock: a file; its holder uses the device while others load. --graphs: pipelines without weights that
with_weights.py is still working on; each is waited for. FILE is updated after each part. The exit status is 1 if a node
is not on the device, a distance exceeds FLOAT16_RATIO yardsticks, a value is not finite, or a part failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # before ONNX Runtime

from benchmarks.gpu.compiled_blocks import FLOAT8, IN_A_ROW, captured, halves_of, our_run, profiled, torch_runs
from benchmarks.gpu.compiled_blocks import measure as measure_turns
from benchmarks.gpu.float8_linear import quantize
from benchmarks.gpu.image_latency import session_of
from benchmarks.gpu.pipelines_on_gpu import PROMPT, distance, own_gigabytes, say, synchronize, used
from benchmarks.gpu.random_weights import made_by
from benchmarks.gpu.unattended import Results, device_alone, wait_for

Tensors = dict[str, torch.Tensor]
HALVES = ("bfloat16", "float16")
PLAIN = (*HALVES, FLOAT8)


@dataclass
class Reference:
    """What float32 PyTorch computed. cases: submodel -> (what, inputs on the host, outputs). latents: at the end of the way."""

    cases: dict[str, list[tuple[str, Tensors, Tensors]]] = field(default_factory=dict)
    latents: Any = None
    image: Any = None


def networks_of(checkpoint: Any, pipeline: Any) -> dict[str, Any]:
    """Submodel -> its module with its ports; the VAE's halves share one."""
    from sdflow.verify.reference.forwards import Network

    found = {}
    for name, submodel in checkpoint.submodels.items():
        part = checkpoint.family.part(name)
        found[name] = Network.of(part, submodel.load["config"], getattr(pipeline, part.component))
    return found


def host(values: Mapping[str, torch.Tensor]) -> Tensors:
    return {
        name: value.detach().float().cpu() if value.is_floating_point() else value.cpu()
        for name, value in values.items()
    }


def forward(network: Any, inputs: Tensors, device: str, dtype: torch.dtype) -> Tensors:
    """The module's own outputs, float32 on the host; inputs in dtype but for those that are exact."""
    exact = {port.name for port in network.ports.inputs if port.exact}
    given = {
        name: (value.to(device, dtype) if value.is_floating_point() and name not in exact else value.to(device))
        for name, value in inputs.items()
    }
    return host(network.model.reference(network.module, given))


def recorded(networks: Mapping[str, Any], names: list[str], run: Any) -> tuple[dict[str, list[Tensors]], Any]:
    """What diffusers feeds these modules while it runs, and what it gives."""
    calls: dict[str, list[Tensors]] = {name: [] for name in names}
    hooks = []
    for name in names:

        def hook(module: Any, arguments: Any, named: Any, name: str = name) -> None:
            calls[name].append(host(networks[name].model.recorded_inputs(arguments, named)))

        hooks.append(networks[name].module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        return calls, run()
    finally:
        for each in hooks:
            each.remove()


def compute_reference(
    checkpoint: Any, pipeline: Any, call: dict[str, Any], latents: torch.Tensor, device: str
) -> Reference:
    family, networks = checkpoint.family, networks_of(checkpoint, pipeline)
    found = Reference()
    drawing = [*family.text_of(checkpoint.submodels), family.denoiser]
    calls, drawn = recorded(
        networks,
        drawing,
        lambda: (
            pipeline(
                prompt=PROMPT,
                latents=family.packed(latents).to(device),
                output_type="latent",
                **call,
                **arguments_of(checkpoint),
            ).images
        ),
    )
    drawn = as_stepped(pipeline, drawn, call)
    what = family.latents({name: each.load["config"] for name, each in checkpoint.submodels.items()})
    (decoded_port,) = networks[family.decoder].ports.inputs
    calls[family.decoder] = [{decoded_port.name: what.to_vae(drawn.float().cpu())}]
    for name, every in calls.items():
        last = len(every) - 1
        for index in sorted({0, last // 2, last}):
            outputs = forward(networks[name], every[index], device, torch.float32)
            found.cases.setdefault(name, []).append((f"run {index + 1} of {last + 1}", every[index], outputs))
    ((_, _, outputs),) = found.cases[family.decoder]
    (pixels,) = outputs.values()
    if family.encoder is not None:
        given = {networks[family.encoder].ports.inputs[0].name: pixels.clamp(-1, 1)}
        found.cases[family.encoder] = [
            ("its image", given, forward(networks[family.encoder], given, device, torch.float32))
        ]
    found.latents, found.image = drawn.float().cpu().numpy(), as_image(pixels)
    return found


def arguments_of(checkpoint: Any) -> Mapping[str, Any]:
    """What diffusers' pipeline is told besides, to read prompts of the length that sdflow's does."""
    return checkpoint.family.reference_arguments_of(
        {name: each.load["config"] for name, each in checkpoint.submodels.items()}
    )


def as_stepped(pipeline: Any, latents: torch.Tensor, call: Mapping[str, Any]) -> torch.Tensor:
    """A diffusers pipeline's latents as sdflow steps them: FLUX.1's come out as rows of patches, FLUX.2's unfolded and without
    their normalization."""
    if latents.ndim == 3:
        return pipeline._unpack_latents(latents, call["height"], call["width"], pipeline.vae_scale_factor)
    statistics = getattr(pipeline.vae, "bn", None)
    if statistics is None:
        return latents
    mean, variance = (each.view(1, -1, 1, 1).to(latents) for each in (statistics.running_mean, statistics.running_var))
    return (pipeline._patchify_latents(latents) - mean) / torch.sqrt(variance + pipeline.vae.config.batch_norm_eps)


def as_image(pixels: torch.Tensor) -> Any:
    """(images, channels, height, width) of a decoder as (images, height, width, channels) in [0, 1]."""
    return (pixels.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()


def relative(found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Relative L2 of each output."""
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm())
        for name, value in wanted.items()
        if value.is_floating_point()
    }


def per_step(run: Any, steps: int) -> float:
    """Milliseconds of a step: the difference of two lengths of the way."""
    times = []
    for count in (steps, steps // 2, steps, steps // 2):
        synchronize()
        begun = time.perf_counter()
        run(count)
        synchronize()
        times.append((count, time.perf_counter() - begun))
    best = {count: min(seconds for each, seconds in times if each == count) for count, _ in times}
    return 1e3 * (best[steps] - best[steps // 2]) / (steps - steps // 2)


def plain_torch(
    checkpoint: Any, pipeline: Any, dtype: str, options: Any, reference: Reference, latents: Any
) -> tuple[dict[str, Any], Any]:
    """diffusers' pipeline in 16 bits, or with its denoiser in float8: each submodel's distances, the image's, its times and
    memory; its denoiser."""
    kind = halves_of(dtype)
    modules = {}
    for name, network in networks_of(checkpoint, pipeline).items():
        component = checkpoint.family.part(name).component
        if component not in modules:
            modules[component] = copy.deepcopy(network.module)
            network.model.to_half(modules[component], kind)
    if dtype == FLOAT8:
        layers = quantize(modules[checkpoint.family.part(checkpoint.family.denoiser).component])
        say(f"PyTorch, float8: {layers} layers")
    companions = {name: getattr(pipeline, name, None) for name in checkpoint.family.companions}
    half = checkpoint.family.torch_pipeline(modules, companions, checkpoint.options)
    half.set_progress_bar_config(disable=True)
    networks = networks_of(checkpoint, half)
    found: dict[str, Any] = {"submodels": {}, "weights_gb": sum(map(weights_gb, modules.values()))}
    for name, cases in reference.cases.items():
        found["submodels"][name] = [
            relative(forward(networks[name], inputs, options.device, kind), outputs) for _, inputs, outputs in cases
        ]

    def draw(steps: int, kind_of: str) -> Any:
        given = checkpoint.family.packed(latents).to(options.device, kind)
        call = {**options.call, "num_inference_steps": steps, **arguments_of(checkpoint)}
        return half(prompt=PROMPT, latents=given, output_type=kind_of, **call).images

    stepped = as_stepped(half, draw(options.steps, "latent").float(), options.call)
    found["latents"] = distance(stepped.cpu().numpy(), reference.latents)
    with peak_gb(found, options.device):
        found["image"] = distance(draw(options.steps, "np"), reference.image)
    found["step_ms"] = per_step(lambda steps: draw(steps, "latent"), options.steps)
    return found, networks[checkpoint.family.denoiser]


def yardsticks(checkpoint: Any, pipeline: Any, options: Any, reference: Reference) -> dict[str, list[dict[str, float]]]:
    """By type and submodel, the distances of PyTorch's in 16 bits that no pipeline of --torch has. One at a time: a second
    pipeline may not fit beside that in float32."""
    from sdflow.manifest import read_manifest

    found, networks = dict[str, list[dict[str, float]]](), networks_of(checkpoint, pipeline)
    for folder in [(options.graphs or options.weights) / name for name in options.names]:
        for name, chain in read_manifest(folder).origin.chains.items():
            kind = kind_of(chain, options.target)
            if kind in options.torch or kind not in HALVES or name not in reference.cases or f"{kind} {name}" in found:
                continue
            network = replace(networks[name], module=copy.deepcopy(networks[name].module))
            network.to_half(kind)
            found[f"{kind} {name}"] = [
                relative(forward(network, inputs, options.device, halves_of(kind)), outputs)
                for _, inputs, outputs in reference.cases[name]
            ]
    return found


def kind_of(chain: Any, target: str) -> str:
    """The type of PyTorch that a submodel is measured against. ONNX Runtime's CUDA provider computes float32 in
    TensorFloat-32, which has as many digits as float16."""
    if chain.quantized is not None:
        return FLOAT8 if chain.quantized.to.startswith(FLOAT8) else chain.quantized.to
    return "float16" if chain.precision == "float32" and target == "cuda" else chain.precision


def weights_gb(module: Any) -> float:
    return sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers())) / 1e9


@contextmanager
def peak_gb(found: dict[str, Any], device: str) -> Iterator[None]:
    """Notes what torch's allocator takes beyond what is there already."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
    yield
    if device == "cuda":
        found["peak_gb"] = (torch.cuda.max_memory_reserved() - before) / 1e9


def artifact(
    folder: Path,
    options: Any,
    reference: Reference,
    latents: torch.Tensor,
    plain: Mapping[str, Any],
    alone: Mapping[str, Any],
) -> tuple[dict[str, Any], Any]:
    """What a pipeline of sdflow gives on the device, beside that; and the pipeline. alone: yardsticks that are in no
    pipeline of `plain`."""
    import numpy as np

    from sdflow.manifest import read_manifest
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.tolerances import FLOAT16_RATIO, FLOAT32_AT_MOST

    chains = read_manifest(folder).origin.chains
    before, used_before, begun = own_gigabytes(), used(), time.perf_counter()
    pipeline = Pipeline.load(folder, options.target, checker=False)
    found: dict[str, Any] = {"load_s": time.perf_counter() - begun, "submodels": {}, "problems": []}
    for name, cases in reference.cases.items():
        precision = chains[name].precision
        rows = []
        for index, (what, inputs, outputs) in enumerate(cases):
            given = {key: value.numpy() for key, value in inputs.items()}
            ours = {
                key: torch.from_numpy(np.float32(value)) for key, value in pipeline.submodels[name](**given).items()
            }
            distances = relative(ours, {key: value for key, value in outputs.items() if key in ours})
            quantized, kind = chains[name].quantized, kind_of(chains[name], options.target)
            if quantized is not None:
                precision = kind
            yardstick = plain.get(kind, {}).get("submodels", {}).get(name, alone.get(f"{kind} {name}"))
            stated = (quantized and quantized.limit) or FLOAT32_AT_MOST
            for key, value in distances.items():
                most = FLOAT16_RATIO * yardstick[index][key] if yardstick else stated
                rows.append({"case": what, "output": key, "distance": value, "at_most": most})
                if not value <= most:
                    found["problems"].append(f"{name} {key}, {what}: {value:.2e} from float32, at most {most:.2e}")
        found["submodels"][name] = {"precision": precision, "distances": rows}

    def draw(steps: int, kind: str) -> Any:
        return pipeline(
            PROMPT, latents=latents, output_type=kind, **{**options.call, "num_inference_steps": steps}
        ).images

    found["latents"] = distance(np.float32(draw(options.steps, "latent")), reference.latents)
    begun = time.perf_counter()
    image = draw(options.steps, "np")
    found["image"], found["first_image_s"] = distance(image, reference.image), time.perf_counter() - begun
    if not np.isfinite(image).all():
        found["problems"].append("the image is not finite")
    begun = time.perf_counter()
    draw(options.steps, "np")
    found["image_s"] = time.perf_counter() - begun
    found["step_ms"] = per_step(lambda steps: draw(steps, "latent"), options.steps)
    found["device_gb"], found["used_gb"] = own_gigabytes() - before, used() - used_before
    worst = max((each["image"] for each in plain.values()), default=0.0)
    if not found["image"] <= FLOAT16_RATIO * worst:
        found["problems"].append(
            f"the image is {found['image']:.4f} from float32's, PyTorch's in 16 bits at most {worst:.4f}"
        )
    found["placement"] = placements(pipeline, folder)
    found["problems"] += [
        f"{name}: {len(each['fallen'])} nodes are not on the device: {', '.join(each['fallen'][:4])}"
        for name, each in found["placement"].items()
        if each["fallen"]
    ]
    return found, pipeline


def placements(pipeline: Any, folder: Path) -> dict[str, Any]:
    """Where the nodes of every session are."""
    from sdflow.runtime.sessions.placement import placement

    sessions = [
        (name, name, bound.session)
        for name, submodel in pipeline.submodels.items()
        for bound in submodel._bound.values()
    ]
    for index, denoiser in enumerate(pipeline.denoisers.kept.values()):
        for attribute in ("_text", "_step"):
            if hasattr(denoiser, attribute):
                label = f"{pipeline.family.denoiser} {attribute.strip('_')} {index}"
                sessions.append((label, pipeline.family.denoiser, session_of(getattr(denoiser, attribute))))
    found = {}
    for label, name, session in sessions:
        placed = placement(session, (folder / name / "model.onnx").resolve())
        found[label] = {
            "nodes": placed.nodes,
            "shapes_on_cpu": placed.shapes_on_cpu,
            "fallen": [str(node) for node in placed.fallen],
            "own_kernels": placed.own_kernels,
        }
    return found


def table(results: Mapping[str, Any]) -> None:
    """What was found, in lines."""
    for name, found in results["sdflow"].items():
        say(f"\n{name}: loaded in {found['load_s']:.1f} s, {found['device_gb']:.1f} GB of the device")
        for submodel, each in found["submodels"].items():
            for row in each["distances"]:
                bits = " ".join(
                    f"{kind} {plain['submodels'][submodel][index][row['output']]:.2e}"
                    for kind, plain in results["torch"].items()
                    for index, other in enumerate(results["cases"][submodel])
                    if other == row["case"]
                )
                say(
                    f"  {submodel:15} {row['output']:18} {row['case']:14} {each['precision']:9}"
                    f" {row['distance']:.2e}; PyTorch: {bits}"
                )
        for label, each in found["placement"].items():
            say(
                f"  nodes of {label}: {each['nodes']}, shapes on the CPU {each['shapes_on_cpu']}, fallen {len(each['fallen'])}"
            )
        say(
            f"  latents {found['latents']:.4f}, image {found['image']:.4f} from float32; a step {found['step_ms']:.1f} ms,"
        )
        say(f"  an image {found['image_s']:.2f} s, the first {found['first_image_s']:.2f} s")
        for problem in found["problems"]:
            say(f"  PROBLEM {problem}")
    for kind, plain in results["torch"].items():
        memory = f"{plain['weights_gb']:.1f} GB of weights, {plain.get('peak_gb', float('nan')):.1f} beside them"
        say(f"PyTorch {kind}, eager: latents {plain['latents']:.4f}, image {plain['image']:.4f};")
        say(f"  a step {plain['step_ms']:.1f} ms; {memory}")
    for name, times in {**results.get("turns_ms", {}), **results.get("captured_ms", {})}.items():
        say(f"a step in turns: {statistics.median(times):7.2f} ms ({min(times):.2f} to {max(times):.2f})  {name}")


def open_checkpoint_of(folder: Path) -> Any:
    from sdflow.manifest import read_manifest
    from sdflow.sources import PlainDigests, reopen_checkpoint

    return reopen_checkpoint(read_manifest(folder).origin, str(folder), digests=PlainDigests())


def measure(options: Any, results: Results, loaded: list[Any], checkpoint: Any) -> None:
    """All parts, once the device is free. loaded: diffusers' pipeline in float32, on the host; it is taken out of it."""
    pipeline = loaded.pop()
    what = checkpoint.family.latents({name: each.load["config"] for name, each in checkpoint.submodels.items()})
    size = options.size or what.image_size
    options.call = {
        "height": size, "width": size, "num_inference_steps": options.steps, "guidance_scale": options.guidance,
    }  # fmt: skip
    shape = (1, what.channels, size // what.scale, size // what.scale)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    found, denoisers = results.found, dict[str, Any]()
    found |= {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch_version": torch.__version__,
        "call": options.call,
        "torch": {},
        "sdflow": {},
    }
    with results.part("to the device"):
        pipeline.to(options.device)
    reference = Reference()
    with results.part(f"float32 at {size}x{size}, {options.steps} steps"):
        reference = compute_reference(checkpoint, pipeline, options.call, latents, options.device)
        found["cases"] = {name: [what for what, _, _ in cases] for name, cases in reference.cases.items()}
    if results.failed:
        return
    for dtype in options.torch:
        with results.part(f"PyTorch in {dtype}"):
            found["torch"][dtype], denoiser = plain_torch(checkpoint, pipeline, dtype, options, reference, latents)
            if dtype in options.compiled:
                denoisers[dtype] = denoiser
            del denoiser
        gc.collect()
    found["alone"] = {}
    with results.part("PyTorch's submodels of other types"):
        found["alone"] = yardsticks(checkpoint, pipeline, options, reference)
    del pipeline
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    runs: dict[str, Callable[[], Any]] = {}
    for name in options.names:
        with results.part(f"{name} on {options.target}"):
            if options.graphs is not None:
                wait_for(options.weights / name)
            found["sdflow"][name], ours = artifact(
                options.weights / name, options, reference, latents, found["torch"], found["alone"]
            )
            if options.compiled:
                runs[f"sdflow {name}"] = our_run(ours, PROMPT, latents, options.call)
            del ours
        gc.collect()
    if not options.compiled:
        return
    for dtype in options.compiled:
        with results.part(f"PyTorch in {dtype}, compiled"):
            ((_, inputs, _), *_) = reference.cases[checkpoint.family.denoiser]
            runs |= torch_runs(dtype, denoisers[dtype], inputs, options.device)
    turns = partial(measure_turns, rounds=options.rounds, in_a_row=options.in_a_row)
    with results.part("a step in turns"):
        found["turns_ms"] = turns(runs)
    if options.profile:
        with results.part("profiles"):
            found["profiles"] = profiled(runs)
    if options.device == "cuda":
        with results.part("a step in turns, PyTorch's in a captured graph"):
            for name in [name for name in runs if name.startswith("compiled")]:
                runs[f"captured {name}"] = captured(runs[name])
            found["captured_ms"] = turns({name: run for name, run in runs.items() if not name.startswith("eager")})


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With the options that `whole_images` takes too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def begin(options: Any, name: str) -> tuple[Results, Any, list[Any]]:
    """Where the results go, the checkpoint of the pipeline `name`, and diffusers' pipeline of it. Exits if that failed."""
    from sdflow.sources.load import load_pipeline

    results = Results(options.json)
    checkpoint = open_checkpoint_of((options.graphs or options.weights) / name)
    with results.part("PyTorch's modules in float32"), made_by(options.processes):
        loaded = [load_pipeline(checkpoint)]
    if results.failed:
        sys.exit(1)
    return results, checkpoint, loaded


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--size", type=int, help="pixels along each side; default: the model's own")
    parser.add_argument("--torch", nargs="+", choices=PLAIN, default=PLAIN, help="what PyTorch's pipelines are in")
    parser.add_argument("--compiled", nargs="+", choices=PLAIN, default=[], help="types, of --torch")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--in-a-row", type=int, default=IN_A_ROW)
    options = parser.parse_args()
    options.device = options.target
    torch.set_grad_enabled(False)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    results, checkpoint, loaded = begin(options, options.names[0])
    loaded[0].set_progress_bar_config(disable=True)
    with device_alone(options.lock):
        measure(options, results, loaded, checkpoint)
    table(results.found)
    problems = any(found["problems"] for found in results.found["sdflow"].values())
    sys.exit(results.failed or problems)


if __name__ == "__main__":
    main()
