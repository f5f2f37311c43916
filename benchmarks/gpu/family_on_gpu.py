"""Test a family at full size on a GPU: node placement on CUDA, images against float32 PyTorch, and times.

    python benchmarks/gpu/family_on_gpu.py GRAPHS --family stable_diffusion_xl --architecture sdxl [--steps 20]

GRAPHS: a folder with every submodel's structure (a graph without weights, `parameters.json`, `config.json`): what the
step before BindWeights leaves in the cache, some MB. Weights are random, seeded and rounded to float16; every engine
gets the same weights and latents. Runs text-to-image, then image-to-image, at the model's own size. diffusers' own
pipelines in float32 are the reference, in float16 the yardstick. Needs torch, diffusers, transformers, onnx and ONNX
Runtime.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from math import sqrt
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.image_latency import (  # the same random weights and the same binding
    bind,
    fill_at_random,
    say,
    session_of,
)

PROMPT = "a photo of an astronaut riding a horse on mars"


def make_module(part: Any, config: dict[str, Any], device: str) -> Any:
    """The library's module in float32 with random weights that float16 holds exactly."""
    with torch.device(device):
        module = part.model.empty(config)
    generator = torch.Generator(device).manual_seed(0)
    fill_at_random(module, generator, device)
    return module


def distance(drawn: Any, expected: Any) -> float:
    """Relative L2 of the pixels around the expected image's mean."""
    return sqrt(float(((drawn - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum()))


def compare_submodels(family: Any, submodels: Any, modules: Any, sizes: Any, others: Any) -> None:
    """Each submodel by itself on made-up inputs of its real sizes: distance to float32 PyTorch, beside float16 PyTorch's and
    that of sessions made otherwise."""
    import numpy as np

    for name, submodel in submodels.items():
        part = family.part(name)
        module = modules[part.component]
        inputs = part.model.dummy(submodel.config, sizes(name))
        given = {key: torch.from_numpy(value).to(next(module.parameters()).device) for key, value in inputs.items()}
        expected = {key: value.float().cpu().numpy() for key, value in part.model.reference(module, given).items()}
        ports = {port.name: port for port in part.model.ports(submodel.config).inputs}
        module.half()
        half = {k: v.half() if v.is_floating_point() and not ports[k].exact else v for k, v in given.items()}
        plain = {key: value.float().cpu().numpy() for key, value in part.model.reference(module, half).items()}
        module.float()
        variants = {"sdflow": submodel, **{label: make(name) for label, make in others.items()}}
        for label, each in variants.items():
            try:
                found = each(**inputs)
            except Exception as error:  # noqa: BLE001  the others are compared all the same
                say(f"{name} {label}: {str(error)[:200]}")
                continue
            for key, value in found.items():
                error, own = (distance(np.float32(x[key]), expected[key]) for x in (found, plain))
                say(f"{name} {key} {label}: {error:.5f}, float16 PyTorch {own:.5f}, finite {np.isfinite(value).all()}")


def compare_variants(
    family: Any, folder: Path, companions: Any, options: Any, arguments: Any, draw: Any, expected: Any
) -> None:
    """The same image with sessions made otherwise: which choice moves it."""
    from dataclasses import replace

    from sdflow.runtime.files.folder import load_submodel
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.runtime.sessions.session import LoadOptions
    from sdflow.runtime.sessions.tuning import UNTUNED
    from sdflow.targets import TARGETS

    choices: dict[str, tuple[bool, dict[str, Any]]] = {
        "in parts": (True, {}),
        "whole": (False, {}),
        "in parts, sdpa_kernel 8": (True, {"provider": {"sdpa_kernel": "8"}}),
        "in parts, sdpa_kernel 2": (True, {"provider": {"sdpa_kernel": "2"}}),
        "in parts, without own kernels": (True, {"own_kernels": False}),
        "in parts, without CUDA graphs": (True, {"cuda_graphs": False}),
    }
    for label, (split, changes) in choices.items():
        load = LoadOptions(tuning=replace(UNTUNED, **changes) if arguments.target == "cuda" else UNTUNED)
        try:
            submodels = {
                name: load_submodel(folder, name, TARGETS[arguments.target], family=family, lazy=True, options=load)
                for name in family.drawing
            }
            made = Pipeline(family, submodels, companions, options, split=split)
            drawn = draw(made)
            again = draw(made)
        except Exception as error:  # noqa: BLE001  the others are compared all the same
            say(f"{label}: {str(error)[:300]}")
            continue
        took = milliseconds(lambda made=made: draw(made), 2) if arguments.target == "cuda" else 0.0
        say(f"{label}: {distance(drawn, expected):.4f}, again {distance(again, expected):.4f}, {took:.0f} ms")


def milliseconds(run: Any, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


def main() -> None:
    from sdflow.distance import psnr
    from sdflow.families import FAMILIES
    from sdflow.runtime.files.folder import load_submodel
    from sdflow.runtime.pipeline import Pipeline
    from sdflow.runtime.sessions.placement import placement
    from sdflow.sources.architectures import architecture_index, companion_folder
    from sdflow.sources.load import load_companion
    from sdflow.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--family", default="stable_diffusion_xl")
    parser.add_argument("--architecture", default="sdxl")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--size", type=int, help="pixels along each side; default: the model's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--parts", action="store_true", help="only compare each submodel by itself")
    parser.add_argument("--variants", action="store_true", help="draw with sessions made otherwise, too")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    family, device = FAMILIES[arguments.family], "cuda" if arguments.target == "cuda" else "cpu"
    torch.backends.cudnn.allow_tf32 = False

    configs = {name: json.loads((arguments.graphs / name / "config.json").read_text()) for name in family.drawing}
    configs[family.encoder] = configs[family.decoder]
    begun = time.perf_counter()
    modules = {
        component: make_module(parts[-1], configs[parts[-1].name], device)
        for component, parts in family.components.items()
        if parts[-1].name in configs
    }
    companions = {
        name: load_companion(companion, companion_folder(arguments.architecture, name), name)
        for name, companion in family.companions.items()
        if companion.part is None
    }
    index = architecture_index(arguments.architecture)
    options = {name: index.get(name, default) for name, default in family.options.items()}
    say(f"[{time.perf_counter() - begun:.1f} s] PyTorch modules")

    what = family.latents(configs)
    size = arguments.size or what.image_size
    first = torch.randn(
        1, what.channels, size // what.scale, size // what.scale, generator=torch.Generator().manual_seed(7)
    )
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    start = torch.stack([rows, columns, -rows])[None]
    settings = {"num_inference_steps": arguments.steps, "guidance_scale": 5.0, "output_type": "np"}

    with torch.no_grad():  # float16 PyTorch gets float32's, as it would from a VAE that is kept in float32
        vae = modules[family.part(family.decoder).component]
        encoded = vae.encode(start.to(device)).latent_dist.mode() * what.factor

    def diffusers_pipelines(parts: dict[str, Any]) -> tuple[Any, Any]:
        import diffusers

        text = family.torch_pipeline(parts, companions, options)
        image = diffusers.AutoPipelineForImage2Image.from_pipe(text)
        for each in (text, image):
            each.set_progress_bar_config(disable=True)
        return text, image

    def torch_images(parts: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        text, image = diffusers_pipelines(parts)
        drawn = {
            "text to image": text(PROMPT, height=size, width=size, latents=first.to(device, dtype), **settings).images
        }
        generator = torch.Generator().manual_seed(3)
        drawn["image to image"] = image(
            PROMPT, image=encoded.to(dtype), strength=0.6, generator=generator, **settings
        ).images
        return drawn

    begun = time.perf_counter()
    reference = torch_images(modules, torch.float32)
    say(
        f"[{time.perf_counter() - begun:.1f} s] reference: "
        + str({k: round(float(v.std()), 3) for k, v in reference.items()})
    )

    folder = Path(tempfile.mkdtemp(prefix="family-on-gpu-"))
    states = {component: module.state_dict() for component, module in modules.items()}
    submodels = {}
    for name in (*family.drawing, family.encoder):
        begun = time.perf_counter()
        bind(arguments.graphs / name, states[family.part(name).component], folder / name)
        say(f"[{time.perf_counter() - begun:.1f} s] weights of {name}")
        submodels[name] = load_submodel(folder, name, TARGETS[arguments.target], family=family, lazy=True)
    if arguments.parts:
        from dataclasses import replace

        from sdflow.models.ports import Sizes
        from sdflow.runtime.sessions.session import LoadOptions
        from sdflow.runtime.sessions.tuning import UNTUNED

        own = Sizes(height=size, width=size, vae_scale=what.scale)

        def other(**changes: Any) -> Any:
            tuning = replace(UNTUNED, **changes) if arguments.target == "cuda" else UNTUNED
            return lambda name: load_submodel(
                folder, name, TARGETS[arguments.target], family=family, lazy=True, options=LoadOptions(tuning=tuning)
            )

        others = {
            "without own kernels": other(own_kernels=False),
            "without TF32": other(provider={"use_tf32": "0"}),
            "without bias fusion": other(provider={"fuse_conv_bias": "0"}),
        }
        compare_submodels(
            family,
            submodels,
            modules,
            lambda name: replace(own, batch=1 if name in (family.decoder, family.encoder) else 2),
            others,
        )
        return
    pipeline = Pipeline(family, submodels, companions, options)

    def ours() -> dict[str, Any]:
        return {
            "text to image": pipeline(PROMPT, height=size, width=size, latents=first, **settings).images,
            "image to image": pipeline(
                PROMPT, start / 2 + 0.5, strength=0.6, generator=torch.Generator().manual_seed(3), **settings
            ).images,
        }

    half = {component: copy.deepcopy(module).half() for component, module in modules.items()}
    for component, parts in family.components.items():
        if component in modules and parts[-1].name in (family.denoiser, family.decoder):
            half[component] = half[component].to(memory_format=torch.channels_last)
    del modules, states
    if device == "cuda":
        torch.cuda.empty_cache()
    begun = time.perf_counter()
    drawn = ours()
    say(f"[{time.perf_counter() - begun:.1f} s] sdflow: loaded and drawn")
    for name, submodel in submodels.items():
        for key, bound in submodel._bound.items():
            found = placement(bound.session, (folder / name / "model.onnx").resolve())
            say(f"{name} {dict(key)}: {found}")
    denoiser = next(iter(pipeline.denoisers.kept.values()))
    for attribute in ("_text", "_step"):
        if hasattr(denoiser, attribute):
            found = placement(
                session_of(getattr(denoiser, attribute)), (folder / family.denoiser / "model.onnx").resolve()
            )
            say(f"{family.denoiser} {attribute}: {found}")
    if arguments.variants:
        compare_variants(
            family,
            folder,
            companions,
            options,
            arguments,
            lambda made: made(PROMPT, height=size, width=size, latents=first, **settings).images,
            reference["text to image"],
        )
    plain = torch_images(half, torch.float16)
    for kind, expected in reference.items():
        say(
            f"{kind}: sdflow {distance(drawn[kind], expected):.4f} relative L2, {psnr(drawn[kind], expected):.1f} dB; "
            f"float16 PyTorch {distance(plain[kind], expected):.4f}, {psnr(plain[kind], expected):.1f} dB"
        )
    if device == "cuda":
        text, _ = diffusers_pipelines(half)
        latents = first.to(device, torch.float16)
        pairs = {
            "sdflow": lambda: pipeline(PROMPT, height=size, width=size, latents=first, **settings),
            "eager": lambda: text(PROMPT, height=size, width=size, latents=latents, **settings),
        }
        for name, run in pairs.items():
            say(f"{name}: {milliseconds(run, arguments.rounds):.1f} ms for {arguments.steps} steps at {size}")
        free, total = torch.cuda.mem_get_info()
        say(f"device memory in use by all: {(total - free) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
