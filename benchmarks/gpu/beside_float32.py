"""Pipelines on a GPU, held against float32 PyTorch part by part: nodes on the device, distances, times a step.

    python benchmarks/gpu/beside_float32.py WEIGHTS NAME [NAME ...] [--steps 28] [--guidance 4.5] [--json FILE] [--target cpu]

WEIGHTS/NAME: what benchmarks/gpu/with_weights.py made; all of one checkpoint. diffusers' own pipeline draws in float32
(TensorFloat-32 off) with the same weights and first latents, and what it feeds each submodel is recorded. Each artifact gets
the same inputs; so does PyTorch in the artifact's 16 bits, which is the yardstick. Then the final latents and the image are
compared.
PyTorch's float16 and bfloat16 pipelines stand beside ours, with eager times. The status is 1 if a node is not on the device, a
distance exceeds FLOAT16_RATIO yardsticks, or something is not finite.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # before ONNX Runtime

from benchmarks.gpu.pipelines_on_gpu import PROMPT, distance, own_gigabytes, say, synchronize

Tensors = dict[str, torch.Tensor]
PLAIN = ("bfloat16", "float16")


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
        networks, drawing, lambda: pipeline(PROMPT, latents=latents.to(device), output_type="latent", **call).images
    )
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
) -> dict[str, Any]:
    """diffusers' pipeline in 16 bits throughout: each submodel's distances, the image's, and its times."""
    kind = getattr(torch, dtype)
    modules = {}
    for name, network in networks_of(checkpoint, pipeline).items():
        component = checkpoint.family.part(name).component
        if component not in modules:
            modules[component] = copy.deepcopy(network.module)
            network.model.to_half(modules[component], kind)
    companions = {name: getattr(pipeline, name, None) for name in checkpoint.family.companions}
    half = checkpoint.family.torch_pipeline(modules, companions, checkpoint.options)
    half.set_progress_bar_config(disable=True)
    networks = networks_of(checkpoint, half)
    found: dict[str, Any] = {"submodels": {}}
    for name, cases in reference.cases.items():
        found["submodels"][name] = [
            relative(forward(networks[name], inputs, options.device, kind), outputs) for _, inputs, outputs in cases
        ]

    def draw(steps: int, kind_of: str) -> Any:
        given = latents.to(options.device, kind)
        return half(PROMPT, latents=given, output_type=kind_of, **{**options.call, "num_inference_steps": steps}).images

    found["latents"] = distance(draw(options.steps, "latent").float().cpu().numpy(), reference.latents)
    found["image"] = distance(draw(options.steps, "np"), reference.image)
    found["step_ms"] = per_step(lambda steps: draw(steps, "latent"), options.steps)
    return found


def artifact(
    folder: Path, options: Any, reference: Reference, latents: torch.Tensor, plain: Mapping[str, Any]
) -> dict[str, Any]:
    """What a pipeline of sdflow gives on the device, beside that."""
    import numpy as np

    from sdflow.manifest import read_manifest
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.tolerances import FLOAT16_RATIO, FLOAT32_AT_MOST

    chains = read_manifest(folder).origin.chains
    before, begun = own_gigabytes(), time.perf_counter()
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
            # ONNX Runtime's CUDA provider computes float32 in TensorFloat-32, which has as many digits as float16.
            kind = "float16" if precision == "float32" and options.target == "cuda" else precision
            yardstick = plain.get(kind, {}).get("submodels", {}).get(name)
            for key, value in distances.items():
                most = FLOAT16_RATIO * yardstick[index][key] if yardstick else FLOAT32_AT_MOST
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
    found["device_gb"] = own_gigabytes() - before
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
    return found


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
                sessions.append((label, pipeline.family.denoiser, getattr(denoiser, attribute).session))
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
        say(f"\n{name}: loaded in {found['load_s']:.1f} s, {found['device_gb']:.1f} GB")
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
        say(
            f"PyTorch {kind}, eager: latents {plain['latents']:.4f}, image {plain['image']:.4f}; a step {plain['step_ms']:.1f} ms"
        )


def main() -> None:
    from sdflow.manifest import read_manifest
    from sdflow.sources import PlainDigests, reopen_checkpoint
    from sdflow.sources.load import load_pipeline

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--size", type=int, help="pixels along each side; default: the model's own")
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.device = options.target
    torch.set_grad_enabled(False)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False

    first = options.weights / options.names[0]
    begun = time.perf_counter()
    checkpoint = reopen_checkpoint(read_manifest(first).origin, str(first), digests=PlainDigests())
    pipeline = load_pipeline(checkpoint).to(options.device)
    pipeline.set_progress_bar_config(disable=True)
    say(f"PyTorch's modules in float32: {time.perf_counter() - begun:.0f} s")
    what = checkpoint.family.latents({name: each.load["config"] for name, each in checkpoint.submodels.items()})
    size = options.size or what.image_size
    options.call = {
        "height": size, "width": size, "num_inference_steps": options.steps, "guidance_scale": options.guidance,
    }  # fmt: skip
    shape = (1, what.channels, size // what.scale, size // what.scale)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    begun = time.perf_counter()
    reference = compute_reference(checkpoint, pipeline, options.call, latents, options.device)
    say(f"float32 at {size}x{size}, {options.steps} steps: {time.perf_counter() - begun:.0f} s")
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch_version": torch.__version__,
        "call": options.call,
        "cases": {name: [what for what, _, _ in cases] for name, cases in reference.cases.items()},
        "torch": {},
        "sdflow": {},
    }
    for dtype in PLAIN:
        results["torch"][dtype] = plain_torch(checkpoint, pipeline, dtype, options, reference, latents)
        gc.collect()
    del pipeline
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    for name in options.names:
        say(f"{name} on {options.target}")
        results["sdflow"][name] = artifact(options.weights / name, options, reference, latents, results["torch"])
        gc.collect()
    table(results)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    sys.exit(any(found["problems"] for found in results["sdflow"].values()))


if __name__ == "__main__":
    main()
