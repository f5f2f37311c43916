"""Each optimization on and off, on a CUDA machine: latency, device memory, and whether the numbers are still right.

    python benchmarks/ablation.py GRAPHS [--weights FOLDER] [--seconds 290] [--only unet decoder text options profile]
                             [--json rows.json]

GRAPHS: one folder for each graph without weights, as `benchmarks/ablation_graphs.py` makes them (unet.base, unet.bias, ...):
see there what their names stand for. Random weights of a sane scale are made on the device and written to FOLDER (2.5
GB, a temporary one by default). Rows are printed as they come; the most telling come first, and what does not fit into
--seconds is named at the end.

Needs numpy, onnx, torch and onnxruntime-gpu; of sdflow only what cuts graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ablation_table import PROVIDER, Ablation, Bound, give_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
STEPS = 50


def tensor(*shape: int, kind: str = "float16", seed: int = 0) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, kind))


def unet_sizes(batch: int) -> dict[str, int]:
    return {"batch": batch, "latent_height": 64, "latent_width": 64, "sequence": 77}


def static(model: Any, sizes: Mapping[str, int]) -> Any:
    """The graph as it is, its axes fixed: what ONNX Runtime itself folds of it."""
    import onnx

    from sdflow.runtime.sessions.specialize import specialize

    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    shapes = specialize(model, sizes)
    for ends in ("input", "output"):
        for item, known in zip(getattr(fixed.graph, ends), getattr(shapes.graph, ends), strict=True):
            item.type.CopyFrom(known.type)
    return fixed


def unet_inputs(batch: int) -> dict[str, Any]:
    """With guidance: both halves of the batch hold the same latents."""
    import torch

    sample = tensor(batch // 2, 4, 64, 64, seed=1)
    return {
        "sample": torch.cat([sample, sample]),
        "timestep": torch.tensor([981.0], device="cuda"),
        "encoder_hidden_states": tensor(batch, 77, 768, seed=2),
    }


@dataclass(frozen=True)
class Case:
    """A variant of a submodel: one of the graphs, provider options, and for a UNet which part of it is measured."""

    name: str
    graph: str
    changes: Mapping[str, str] = field(default_factory=dict)
    split: bool = True
    guidance: bool = True


FUSED = {"fuse_conv_bias": "1"}
UNET = (
    Case("biases, resize", "bias_resize"),
    Case("norms, qkv 320, fuse_conv_bias", "norms_qkv320", FUSED),
    Case("norms, fuse_conv_bias", "norms", FUSED),
    Case("norms, qkv 640, fuse_conv_bias", "norms_qkv640", FUSED),
    Case("norms", "norms"),
    Case("resize, fuse_conv_bias", "resize", FUSED),
    Case("biases, resize, fuse_conv_bias", "bias_resize", FUSED),
)
"""Of the step, with guidance: the UNet's part that each step runs."""
MANY = UNET[:4]
WHOLE = (
    Case("whole, as built", "base", split=False),
    Case("whole, biases, resize", "bias_resize", split=False),
    Case("whole, norms, fuse_conv_bias", "norms", FUSED, split=False),
    Case("norms, fuse_conv_bias, without sharing", "norms", FUSED, guidance=False),
)
DECODER = (
    Case("biases, resize", "bias_resize"),
    Case("biases, resize, fuse_conv_bias", "bias_resize", FUSED),
    Case("resize, fuse_conv_bias", "resize", FUSED),
)


def unet(table: Ablation, batch: int, cases: Sequence[Case]) -> Bound | None:
    """The UNet, whole or its step. Returns the fastest."""
    import torch

    from sdflow.runtime.denoiser.split import split
    from sdflow.runtime.sessions.specialize import specialize

    inputs, sizes = unet_inputs(batch), unet_sizes(batch)
    best: tuple[float, Bound | None] = (float("inf"), None)
    for case in cases:
        if time.monotonic() > table.end:
            table.skipped.append(f"unet {case.name} batch {batch}")
            continue
        model, given = table.graphs[f"unet.{case.graph}"], inputs
        if case.split:
            parts = split(model, sizes, guidance=case.guidance)
            given, used = _given(table, parts, inputs), parts.step
        else:
            used = static(model, sizes) if case.graph == "base" else specialize(model, sizes)
        bound = table.measure("unet", case.name, batch, used, given, "out_sample", **case.changes)
        if bound and table.rows[-1].milliseconds < best[0]:
            best = table.rows[-1].milliseconds, bound
        del bound
        torch.cuda.empty_cache()
    return best[1]


def _given(table: Ablation, parts: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of the step: what the other two parts give."""
    plain = {**PROVIDER, "enable_cuda_graph": "0"}
    text = Bound(parts.text, table.folder, plain, {"encoder_hidden_states": inputs["encoder_hidden_states"]})
    steps = {"timestep": inputs["timestep"].repeat(STEPS)}
    times = Bound(_steps(parts.timestep, STEPS), table.folder, plain, steps)
    given = {"sample": inputs["sample"][: parts.latents], **text.outputs}
    for item in parts.step.graph.input:
        if item.name in times.outputs:
            value = times.outputs[item.name][:1]
            rows = item.type.tensor_type.shape.dim[0].dim_value
            given[item.name] = value.repeat(rows, *[1] * (value.dim() - 1))
    return given


def _steps(model: Any, steps: int) -> Any:
    """The timestep part for so many timesteps: a session binds outputs of known shape."""
    import onnx

    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for item in (*fixed.graph.input, *fixed.graph.output):
        item.type.tensor_type.shape.dim[0].dim_value = steps
    return fixed


def decoder(table: Ablation, batch: int) -> Bound | None:
    """Returns the fastest."""
    from sdflow.runtime.sessions.specialize import specialize

    inputs = {"latent_sample": tensor(batch, 4, 64, 64, seed=3)}
    sizes = {"batch": batch, "latent_height": 64, "latent_width": 64}
    best: tuple[float, Bound | None] = (float("inf"), None)
    for case in DECODER:
        model = table.graphs[f"vae_decoder.{case.graph}"]
        used = specialize(model, sizes)
        bound = table.measure("decoder", case.name, batch, used, inputs, "sample", **case.changes)
        if bound and table.rows[-1].milliseconds < best[0]:
            best = table.rows[-1].milliseconds, bound
    return best[1]


def text(table: Ablation, batch: int) -> None:
    import torch

    from sdflow.runtime.sessions.specialize import specialize

    ids = torch.randint(0, 49407, (batch, 77), device="cuda", dtype=torch.int32)
    model, sizes, wanted = table.graphs["text_encoder.base"], {"batch": batch, "sequence": 77}, "last_hidden_state"
    inputs = {"input_ids": ids}
    table.measure("text", "as built", batch, static(model, sizes), inputs, wanted)
    table.measure("text", "shapes folded, no pooled output", batch, specialize(model, sizes, [wanted]), inputs, wanted)


OPTIONS: Sequence[Mapping[str, str]] = (
    {"cudnn_conv_algo_search": "HEURISTIC"},
    {"cudnn_conv_use_max_workspace": "0"},
    {"arena_extend_strategy": "kSameAsRequested"},
    {"prefer_nhwc": "1"},
    {"sdpa_kernel": "8"},
)
"""Provider options, each tried alone on a variant of the UNet."""


def profile(bound: Bound, title: str, runs: int = 5) -> None:
    """Print the kernels of a run, grouped by name, from torch's profiler: it sees all kernels of this process."""
    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(runs):
            bound.run()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in recorded.events():
        if str(event.device_type).endswith("CUDA"):
            name = short_name(event.name)
            spent[name] += event.device_time_total
            count[name] += 1
    print(f"\n{title}: {sum(spent.values()) / runs / 1e3:.3f} ms of kernels, {sum(count.values()) / runs:.0f} launches")
    for name, microseconds in spent.most_common(45):
        print(f"  {microseconds / runs / 1e3:7.3f} ms  {count[name] / runs:5.0f} x  {name}")


def short_name(name: str) -> str:
    """A kernel's name without its arguments and most of its template's."""
    name = re.sub(r"\((?!anonymous).*", "", name.replace("(anonymous namespace)::", ""))
    name = re.sub(r"^void ", "", name)
    return name if len(name) < 90 else name[:87] + "..."


def main() -> None:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnx
    import torch  # before onnxruntime, so that its CUDA and cuDNN libraries are the ones that are loaded

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seconds", type=float, default=290)
    parser.add_argument("--only", nargs="+", choices=["unet", "decoder", "text", "options", "profile"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = set(arguments.only or ["unet", "decoder", "text", "options", "profile"])
    started = time.monotonic()
    graphs = {
        path.name: onnx.load(str(path / "model.onnx"), load_external_data=False)
        for path in sorted(arguments.graphs.iterdir())
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.weights or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        give_weights(graphs, folder)
        import onnxruntime

        onnxruntime.set_default_logger_severity(4)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
        print(f"weights made in {time.monotonic() - started:.0f} s", flush=True)
        table = Ablation(graphs, folder, arguments.seconds - (time.monotonic() - started))
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            measure(table, wanted)
    for name in table.skipped:
        print(f"no time left for: {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps([{**asdict(row), "right": row.right} for row in table.rows], indent=1))


def measure(table: Ablation, wanted: set[str]) -> None:
    best = unet(table, 2, UNET) if "unet" in wanted else None
    if best and "profile" in wanted:
        profile(best, "UNet step, batch 2")
    del best
    best = decoder(table, 1) if "decoder" in wanted else None
    if best and "profile" in wanted:
        profile(best, "VAE decoder, one image")
    del best
    if "unet" in wanted:
        unet(table, 16, MANY)
    if "decoder" in wanted:
        decoder(table, 8)
    if "unet" in wanted:
        unet(table, 2, WHOLE)
    if "text" in wanted:
        text(table, 2)
    if "options" in wanted:
        for change in OPTIONS:
            name = " ".join(f"{key}={value}" for key, value in change.items())
            unet(table, 2, [replace(UNET[1], name=name, changes={**FUSED, **change})])


if __name__ == "__main__":
    main()
