"""Compare float8 products at the sizes of transformers: PyTorch's, and sdflow's operator with its own kernels and
cuBLASLt's.

    python benchmarks/gpu/float8_products.py [ROWSxKxN ...] [--json FILE]

Prints microseconds and TFLOP/s, medians of turns, for torch.matmul in bfloat16, torch._scaled_mm with row and column
scales, and Float8ProductBfloat16 with cuBLASLt, with sdflow's tiles, and with its tiles and alternating warpgroups.
Each is a captured graph of several products with separate values, more than the L2 cache holds. First each library is
compiled and verified.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from onnx import TensorProto, helper

from benchmarks.gpu.captured import TYPES, Captured, microseconds
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels import compilation
from sdflow.runtime.kernels.compilation import DEFINES
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.parts import FLOAT8

COUNT, TURNS, RUNS, REST = 6, 5, 3, 0.02
SIZES = (
    *("4608x3072x27648", "4608x12288x3072", "4096x3072x3072", "4096x3072x9216", "4096x3072x18432", "4096x9216x3072"),
    *("512x3072x3072", "512x3072x9216", "512x3072x18432", "512x9216x3072"),
    *("4160x3840x3840", "4160x3840x11520", "4160x3840x10240", "4160x3840x20480", "4160x10240x3840"),
    *("8192x1536x1536", "8192x1536x4608", "8192x1536x6144", "8192x6144x1536"),
    *("666x1536x1536", "666x1536x4608", "666x1536x6144", "666x6144x1536"),
)
"""Of klein, Z-Image and SD3.5-medium, and of q, k and v, or both products before a gate, as one."""
LIBRARIES = {
    "cuBLASLt": {"FLOAT8_MOST_DEPTH": 0},
    "ours": {"FLOAT8_MOST_DEPTH": 1 << 24, "FLOAT8_LEAST_FILLED": 0},
    "ours in turns": {"FLOAT8_MOST_DEPTH": 1 << 24, "FLOAT8_LEAST_FILLED": 0, "FLOAT8_IN_TURNS": 1},
}


def session_run(library: Path, operands: list[dict[str, torch.Tensor]], shape: tuple[int, int]) -> Callable[[], Any]:
    """A captured session of one Float8ProductBfloat16 for each of the operands."""
    nodes, inputs, outputs, values = [], [], [], {}
    for index, given in enumerate(operands):
        named = {f"{name}{index}": value for name, value in given.items()}
        values |= named
        inputs += [
            helper.make_tensor_value_info(name, TYPES[value.dtype], tuple(value.shape)) for name, value in named.items()
        ]
        node = helper.make_node("Float8ProductBfloat16", list(named), [f"y{index}", f"workspace{index}"], domain=DOMAIN)
        nodes.append(node)
        outputs.append(helper.make_tensor_value_info(f"y{index}", TensorProto.BFLOAT16, shape))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "products", inputs, outputs)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return Captured(model, library, values)


def captured(products: list[Callable[[], torch.Tensor]]) -> Callable[[], Any]:
    """PyTorch's products, one after the other, as one CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for each in products:
            each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [each() for each in products]

    def run() -> Any:
        graph.replay()
        return results

    return run


def measure(size: str, libraries: dict[str, Path]) -> dict[str, Any]:
    rows, k, n = map(int, size.split("x"))
    operands, halves = [], []
    for _ in range(COUNT):
        x, weight = torch.randn(rows, k, device="cuda"), torch.randn(n, k, device="cuda") / k**0.5
        scaled = [(each.abs().amax(1, keepdim=True) / 448, each) for each in (x, weight)]
        (sx, x8), (sw, w8) = ((s, (each / s).to(torch.float8_e4m3fn)) for s, each in scaled)
        operands.append({"x": x8.view(torch.uint8), "sx": sx.flatten(), "w": w8.view(torch.uint8), "sw": sw.flatten()})
        halves.append((x.bfloat16(), weight.bfloat16()))
    runs: dict[str, Callable[[], Any]] = {}
    errors = {}

    def attempt(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            runs[name] = make()
        except Exception as error:  # noqa: BLE001  the others are measured all the same
            errors[name] = str(error)[:300]

    attempt("torch bfloat16", lambda: captured([lambda x=x, w=w: x @ w.t() for x, w in halves]))

    def scaled_mm(given: dict[str, torch.Tensor]) -> torch.Tensor:
        x8, w8 = (given[name].view(torch.float8_e4m3fn) for name in ("x", "w"))
        scales = given["sx"][:, None], given["sw"][None]
        return torch._scaled_mm(x8, w8.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    attempt("torch float8", lambda: captured([lambda given=given: scaled_mm(given) for given in operands]))
    for name, library in libraries.items():
        attempt(name, lambda library=library: session_run(library, operands, (rows, n)))
    exact = [x.float() @ w.float().t() for x, w in halves[:1]]
    apart = {name: float((run()[0].float() - exact[0]).norm() / exact[0].norm()) for name, run in runs.items()}
    turns = [
        {name: microseconds(run, runs=RUNS, rest=REST) / COUNT for name, run in runs.items()} for _ in range(TURNS)
    ]
    took = {name: statistics.median(turn[name] for turn in turns) for name in runs}
    return {
        "microseconds": took,
        "teraflops": {name: 2 * rows * k * n / each / 1e6 for name, each in took.items()},
        "apart": apart,
        "errors": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=SIZES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    libraries, found = {}, {}
    for name, given in LIBRARIES.items():
        begun = time.perf_counter()
        compilation.DEFINES = DEFINES | given
        try:
            libraries[name] = build([FLOAT8])
        except Exception as error:  # noqa: BLE001
            print(f"{name}: {error}", flush=True)
        print(f"{name}: compiled and proved in {time.perf_counter() - begun:.1f} s", flush=True)
    for size in options.sizes:
        each = found[size] = measure(size, libraries)
        words = [
            f"{name} {took:.1f} us {each['teraflops'][name]:.0f} TFLOP/s ({each['apart'][name]:.1e})"
            for name, took in each["microseconds"].items()
        ]
        print(f"  {size}: {'; '.join(words)}", *(f"{name}: {why}" for name, why in each["errors"].items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
