"""Measure how long a transformer's step takes on a GPU at least: its products and attentions, and nothing else.

    python benchmarks/gpu/step_floor.py [NAME[:ROWS[:TOKENS]] ...] [--size 1024] [--seconds 3] [--json FILE]

NAME: an architecture of `synthetic:`, such as flux2-klein-4b. ROWS: images in a batch, 2 with guidance. TOKENS: of the
prompt. PyTorch's module runs once without memory (on the meta device), and every product and attention is recorded. On
the GPU, they run in the same order from one CUDA graph: products by cuBLAS in bfloat16, and those that QuantizeFp8 quantizes
also in float8 with a scale for each row (`torch._scaled_mm`); attention by cuDNN. Every product has its own weights, so they
come from memory as in a step. Norms, activations, rotations, modulations, and quantization are left out. The graph is
replayed for --seconds: busy tensor cores lower the GPU's clock, so the first replays are faster than later ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.fx.experimental._config as fake_values
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SMALLEST = 1 << 20
"""Values of a weight from which QuantizeFp8 quantizes it, as in the shipped workflows."""
BLOCKS_OF_ROWS = 64
"""Products with fewer rows, which embed timesteps and the like, stay in bfloat16."""

Operation = tuple[str, tuple[int, ...]]
"""("product", (rows, depth, columns)), or ("attention", (batch, heads, tokens, tokens read, width))."""


class Recorded(TorchDispatchMode):
    """The products and attentions that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            a, b = args[-2:]
            self.found.append(("product", (a.shape[0], a.shape[1], b.shape[1])))
        return func(*args, **(kwargs or {}))


class RecordedAttention(TorchFunctionMode):
    """Adds attentions to what was found, before PyTorch takes them apart."""

    def __init__(self, found: list[Operation]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            query, key = (*args, *(kwargs or {}).values())[:2]
            self.found.append(("attention", (*query.shape[:3], key.shape[2], query.shape[3])))
            return torch.empty_like(query)
        return func(*args, **(kwargs or {}))


def operations(architecture: str, rows: int, size: int, tokens: int) -> list[Operation]:
    """What one call of an architecture's denoiser computes."""
    from sdflow.models.ports import Sizes
    from sdflow.sources import PlainDigests, open_checkpoint

    checkpoint = open_checkpoint(f"synthetic:{architecture}", digests=PlainDigests(), download=False)
    denoiser = checkpoint.family.denoiser
    config = checkpoint.submodels[denoiser].load["config"]
    model = checkpoint.family.part(denoiser).of(config).model
    fake_values.meta_nonzero_assume_all_nonzero = True  # Z-Image picks the tokens that a mask leaves: here all
    with torch.device("meta"):
        module = model.empty(config).to(torch.bfloat16).eval()
    what = checkpoint.family.latents({name: each.load["config"] for name, each in checkpoint.submodels.items()})
    axes = {**model.more_axes(config), **Sizes(batch=rows, sequence=tokens).axes()}
    axes |= dict.fromkeys(("latent_height", "latent_width"), size // what.scale)
    axes |= {axis: tokens for axis in axes if axis.endswith("sequence")}
    random, inputs = np.random.default_rng(0), {}
    for port in model.ports(config).inputs:
        value = torch.from_numpy(model.values(port, list(port.shape(axes)), config, random))
        lower = value.is_floating_point() and not port.exact
        inputs[port.name] = value.to("meta", torch.bfloat16) if lower else value.to("meta")
    with Recorded() as recorded, RecordedAttention(recorded.found), torch.no_grad():
        model.reference(module, inputs)
    return recorded.found


def runs_of(found: list[Operation], float8: bool) -> dict[str, Callable[[], None]]:
    """The products, the attentions, and both in order, as functions for the GPU."""
    begin = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=begin, device="cuda", dtype=torch.bfloat16)

    inputs: dict[tuple[int, ...], Any] = {}
    scale = lambda count: torch.ones(count, device="cuda")  # noqa: E731

    def product(rows: int, depth: int, columns: int) -> Callable[[], Any]:
        weights = random(columns, depth) / depth**0.5
        if float8 and rows >= BLOCKS_OF_ROWS and depth * columns >= SMALLEST:
            key = (rows, depth, 8)
            if key not in inputs:
                inputs[key] = (random(rows, depth).to(torch.float8_e4m3fn), scale(rows)[:, None])
            values, scales = inputs[key]
            ours, own = weights.to(torch.float8_e4m3fn), scale(columns)[None]
            return lambda: torch._scaled_mm(
                values, ours.t(), scale_a=scales, scale_b=own, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        values = inputs.setdefault((rows, depth), random(rows, depth))
        return lambda: torch.mm(values, weights.t())

    def attention(batch: int, heads: int, tokens: int, read: int, width: int) -> Callable[[], Any]:
        query, key, value = (random(batch, heads, count, width) for count in (tokens, read, read))
        return lambda: scaled_dot_product_attention(query, key, value)

    calls = [(kind, (product if kind == "product" else attention)(*shape)) for kind, shape in found]

    def run(*kinds: str) -> Callable[[], None]:
        def all_of() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                for kind, call in calls:
                    if kind in kinds:
                        call()

        return all_of

    return {"products": run("product"), "attention": run("attention"), "both": run("product", "attention")}


def sustained(run: Callable[[], None], seconds: float) -> dict[str, float]:
    """Milliseconds of one replay of a captured graph: the fastest, and the median of the second half; the clock then."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    query = ["nvidia-smi", f"--id={torch.cuda.get_device_properties(0).uuid}", "--query-gpu=clocks.sm,power.draw"]
    watch = subprocess.Popen(
        [*query, "--format=csv,noheader,nounits", "--loop-ms=100"], stdout=subprocess.PIPE, text=True
    )
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 2:
        begin, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        over.record()
        over.synchronize()
        times.append(begin.elapsed_time(over) / 5)
    watch.terminate()
    seen = [tuple(map(float, line.split(","))) for line in watch.communicate()[0].splitlines() if line.count(",") == 1]
    late = seen[len(seen) // 2 :] or [(float("nan"), float("nan"))]
    megahertz, watts = (statistics.median(values) for values in zip(*late, strict=True))
    return {"ms": statistics.median(times[len(times) // 2 :]), "best": min(times), "mhz": megahertz, "watts": watts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["flux2-klein-4b", "z-image-turbo:1:64", "sd35-medium:2:333", "flux1-schnell"]
    parser.add_argument("names", nargs="*", default=default)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="list the operations; needs no GPU")
    options = parser.parse_args()
    every: dict[str, Any] = {}
    for name in options.names:
        architecture, rows, tokens = (name.split(":") + [""] * 2)[:3]
        found = operations(architecture, int(rows or 1), options.size, int(tokens or 512))
        flop = sum(2 * a * b * c for kind, (a, b, c, *_) in found if kind == "product")
        attended = sum(
            4 * b * h * n * m * w for kind, (b, h, n, m, w) in (each for each in found if each[0] == "attention")
        )
        every[name] = result = {"operations": len(found), "tflop": flop / 1e12, "attention_tflop": attended / 1e12}
        print(f"{name}: {len(found)} operations, {flop / 1e12:.1f} + {attended / 1e12:.1f} TFLOP", flush=True)
        if options.list:
            for each in sorted(set(found)):
                print(f"  {found.count(each)} x {each}")
            continue
        result["device"] = torch.cuda.get_device_name()
        for precision in ("bfloat16", "float8"):
            runs = runs_of(found, precision == "float8")
            result[precision] = {what: sustained(run, options.seconds) for what, run in runs.items()}
            del runs
            torch.cuda.empty_cache()
            row = ", ".join(
                f"{what} {each['ms']:.1f} ms (at first {each['best']:.1f}; {each['mhz']:.0f} MHz, {each['watts']:.0f} W)"
                for what, each in result[precision].items()
            )
            print(f"  {precision}: {row}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
