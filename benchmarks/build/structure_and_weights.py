"""Measure time and peak memory of structure and bind, compared with a copy of the result and with carrying weights.

    python benchmarks/build/structure_and_weights.py [MODEL] [--submodel unet ...] [--target cuda ...] [--loras N] [--carried]
        [--json]

MODEL: as in a workflow, synthetic:sd15 by default; synthetic:sdxl has only the UNet. Each step runs in a separate
process; peak memory is its maximum resident set, including imports. `--carried` also runs the chain with weights
carried through every pass, and requires both results to be equal byte for byte. `--loras N` merges N random LoRAs into
UNet and text encoder in both. A step that fails or is killed is reported and skipped. The whole proof: all submodels,
`--target cuda --target rocm --target directml --target cpu --carried`, with `--loras` 0, 1 and 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

SILENCE = {
    "OLIVE_DISABLE_TELEMETRY": "1", "CI": "1", "ORT_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1",
    "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
MODEL_TYPE = {
    "text_encoder": "clip",
    "safety_checker": "clip",
    "unet": "unet",
    "vae_encoder": "vae",
    "vae_decoder": "vae",
}
SWITCHES = {
    "cuda": {},
    "rocm": {"enable_skip_group_norm": False, "enable_bias_splitgelu": False, "enable_bias_add": False},
    "directml": {
        "enable_skip_layer_norm": False, "enable_bias_skip_layer_norm": False, "enable_qordered_matmul": False,
        "enable_nhwc_conv": False, "enable_bias_splitgelu": False, "enable_bias_add": False,
        "group_norm_channels_last": False,
    },
    "cpu": {
        "enable_packed_qkv": False, "enable_packed_kv": False, "enable_nhwc_conv": False, "enable_group_norm": False,
        "enable_skip_group_norm": False, "enable_bias_splitgelu": False, "enable_bias_add": False,
    },
}  # fmt: skip


def chain(submodel: str, target: str) -> list[Any]:
    """The passes of a submodel for a target, as sdflow's workflows have them."""
    from sdflow.passes.chain import ChainStep
    from sdflow.passes.conv_bias_fusion import ConvBiasFusion
    from sdflow.passes.float16 import OnnxFloatToFloat16
    from sdflow.passes.onnx_conversion import OnnxConversion
    from sdflow.passes.ort_transformers_optimization import OrtTransformersOptimization
    from sdflow.passes.separate_qkv import SeparateQkv
    from sdflow.passes.subpixel_conv import SubpixelConv

    opset = 14 if submodel == "safety_checker" else 17
    fuse = {"model_type": MODEL_TYPE[submodel], "optimization_options": SWITCHES[target]}
    steps = [ChainStep(OnnxConversion, {"target_opset": opset}), ChainStep(OrtTransformersOptimization, fuse)]
    if target == "cuda":
        own = {
            "unet": (ConvBiasFusion, SubpixelConv, SeparateQkv),
            "vae_encoder": (ConvBiasFusion,),
            "vae_decoder": (ConvBiasFusion, SubpixelConv),
        }
        steps += [ChainStep(implementation, {}) for implementation in own.get(submodel, ())]
    return steps if target == "cpu" else [*steps, ChainStep(OnnxFloatToFloat16, {})]


def load_of(model: str, submodel: str) -> dict[str, Any]:
    from sdflow.sources import PlainDigests, open_checkpoint

    return dict(open_checkpoint(model, digests=PlainDigests(), download=False).submodels[submodel].load)


def structure(model: str, submodel: str, target: str, out: Path) -> None:
    from sdflow.passes.worker import run_pass
    from sdflow.weights.structure import hollow

    source: Path | None = None
    steps = chain(submodel, target)
    for index, step in enumerate(steps):
        folder = out if index == len(steps) - 1 else Path(tempfile.mkdtemp(dir=out.parent))
        request = {
            "pass": step.implementation.name,
            "folder": ".",
            "submodel": submodel,
            "model": str(source) if source else None,
            "symbolic": True,
            "family": "stable_diffusion_xl" if "sdxl" in model else "stable_diffusion",
            "checkpoint": {} if source else hollow(load_of(model, submodel)),
            "loras": [],
            "config": step.implementation.Config(**step.config).model_dump(mode="json"),
            "out": str(folder),
        }
        run_pass(request, lambda phrase: None)
        if source is not None:
            shutil.rmtree(source)
        source = folder


def bind(model: str, submodel: str, structure_dir: Path, loras: list[Path], out: Path) -> None:
    from sdflow.weights.bind import BindRequest
    from sdflow.weights.bind import bind as run
    from sdflow.weights.lora import LoraInput

    taken = [LoraInput(path, 0.8) for path in loras]
    run(BindRequest(submodel, structure_dir, load_of(model, submodel), taken), out)


def carried(model: str, submodel: str, target: str, loras: list[Path], out: Path) -> None:
    from sdflow.passes.base import PassInputs
    from sdflow.passes.chain import ChainStep
    from sdflow.passes.lora_merge import LoraMerge
    from sdflow.weights.lora import LoraInput

    source: Path | None = None
    taken = tuple(LoraInput(path, 0.8) for path in loras)
    steps = chain(submodel, target)
    if taken and submodel in ("unet", "text_encoder"):
        steps.insert(1, ChainStep(LoraMerge, {}))
    for index, step in enumerate(steps):
        folder = out / str(index)
        folder.mkdir()
        merges = taken if step.implementation is LoraMerge else ()
        inputs = PassInputs(submodel, source, load_of(model, submodel) if source is None else {}, loras=merges)
        step.implementation().run(inputs, folder, step.implementation.Config(**step.config))
        if source is not None:
            shutil.rmtree(source)
        source = folder


def copy(source: Path, out: Path) -> None:
    """Copy as `cp` does."""
    for path in source.iterdir():
        shutil.copyfile(path, out / path.name)


class Failed(Exception):
    """A step failed or was killed."""


def _child(results: Any, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    begin = time.perf_counter()
    function(*arguments)
    seconds = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_SELF)
    results.put((seconds, usage.ru_maxrss // 1024, usage.ru_utime + usage.ru_stime))


def measured(function: Callable[..., None], *arguments: Any) -> dict[str, float]:
    """Run `function` in a new process; seconds include its start and imports, as for a worker of sdflow's."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    begin = time.perf_counter()
    process = spawn.Process(target=_child, args=(results, function, arguments))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise Failed(f"{function.__name__} ended with exit status {process.exitcode}, -9 means killed")
    _, peak, cpu = results.get()
    return {"seconds": round(time.perf_counter() - begin, 2), "cpu_seconds": round(cpu, 2), "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="synthetic:sd15")
    parser.add_argument("--submodel", action="append", choices=tuple(MODEL_TYPE))
    parser.add_argument("--target", action="append", choices=tuple(SWITCHES), help="cuda by default; repeatable")
    parser.add_argument("--loras", type=int, default=0, metavar="N", help="merge N random LoRAs (SD1.5 only)")
    parser.add_argument("--carried", action="store_true", help="run the carrying passes too, and compare")
    parser.add_argument("--scratch", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--json", action="store_true", help="one JSON object per step")
    arguments = parser.parse_args()
    os.environ.update(SILENCE)
    scratch = Path(tempfile.mkdtemp(prefix="structure-", dir=arguments.scratch))
    wrong, equal = [], []
    try:
        loras = [scratch / f"lora{index}.safetensors" for index in range(arguments.loras)]
        for seed, path in enumerate(loras):
            from benchmarks.build.beside_olive import write_lora

            write_lora(path, "sd15", seed)
        for submodel, target in product(arguments.submodel or MODEL_TYPE, arguments.target or ["cuda"]):

            def step(
                name: str, function: Callable[..., None], *rest: Any, at: tuple[str, str] = (submodel, target)
            ) -> Path:
                out = scratch / "-".join(at) / name
                out.mkdir(parents=True)
                figures = measured(function, *rest, out)
                size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
                row = {"submodel": at[0], "target": at[1], "step": name, **figures, "bytes": size}
                text = (
                    "{submodel:15} {target:9} {step:10} {seconds:8.1f} s, CPU {cpu_seconds:8.1f} s {peak_mb:7} MB "
                    "{bytes:14,} B"
                )
                print(json.dumps(row) if arguments.json else text.format(**row), flush=True)
                return out

            try:
                made = step("structure", structure, arguments.model, submodel, target)
                bound = step("bind", bind, arguments.model, submodel, made, loras)
                step("copy", copy, bound)
                if arguments.carried:
                    (last,) = step("carried", carried, arguments.model, submodel, target, loras).iterdir()
                    names = {path.name for path in (*last.iterdir(), *bound.iterdir())}
                    different = [name for name in sorted(names) if not same(last / name, bound / name)]
                    wrong += [f"{submodel} for {target}: {name} differs" for name in different]
                    equal += [] if different else [f"{submodel} for {target}"]
            except Failed as failure:
                wrong.append(f"{submodel} for {target}: {failure}")
                print(wrong[-1], flush=True)
            shutil.rmtree(scratch / f"{submodel}-{target}")
    finally:
        shutil.rmtree(scratch)
    if equal:
        print(f"equal, byte for byte, to what carrying the weights gives: {', '.join(equal)}")
    if wrong:
        sys.exit("\n".join(wrong))


def same(first: Path, second: Path) -> bool:
    """Whether two files have equal content."""
    from sdflow.digest import digest_file

    return first.exists() and second.exists() and digest_file(first) == digest_file(second)


if __name__ == "__main__":
    main()
