"""Compare int8 products at the sizes of transformers and of SDXL's UNet: PyTorch's, and sdflow's operators.

    python benchmarks/gpu/int8_products.py [ROWSxKxN ...] [--json FILE]

Prints microseconds and TFLOP/s (TOP/s), medians of turns, for torch.matmul in bfloat16, torch._int_mm (int32 sums
without scales), Int8ProductBfloat16 with wide tiles, narrow tiles and those it chooses, Int8Product (float16) with the
kernel for compute capability 7.5, and Int8RowsBfloat16, without and with a rotation of 64. Each is a captured graph of
several runs with separate values, more than the L2 cache holds. First the library is compiled and verified. Distances
are relative L2 to float32. The exit status is 1 if a product fails or is too far from float32.
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
from benchmarks.gpu.float8_products import captured
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.int8_proof import ANY, NARROW, TURING, WIDE
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.parts import INT8
from sdflow.runtime.kernels.proof import prove

COUNT, TURNS, RUNS, REST = 6, 5, 3, 0.02
SIZES = (
    *("4608x3072x27648", "4608x12288x3072", "4096x3072x3072", "4096x3072x9216", "4096x9216x3072", "512x3072x9216"),
    *("4160x3840x11520", "4160x3840x20480", "4160x10240x3840"),
    *("8192x1536x4608", "8192x1536x6144", "8192x6144x1536"),
    *("8192x640x5120", "8192x2560x640", "2048x1280x10240", "2048x5120x1280", "2048x1280x1280"),
)
"""Of klein, Z-Image, SD3.5-medium and SDXL (two images of 1024 x 1024), several products of one value as one."""
KERNELS = {"chosen": ANY, "wide": WIDE, "narrow": NARROW, "for 7.5": TURING}
LARGEST = 127.0
FARTHEST = 0.02
"""Maximum distance of an int8 product from float32, relative L2; 0.012 to 0.013 were measured."""

Named = dict[str, torch.Tensor]


def session_run(
    library: Path,
    operator: str,
    operands: list[Named],
    outputs: dict[str, tuple[int, tuple[int, ...]]],
    attributes: dict[str, int],
) -> Callable[[], Any]:
    """A captured session of one node for each of the operands. outputs: element types and shapes."""
    nodes, inputs, results, values = [], [], [], {}
    for index, given in enumerate(operands):
        named = {f"{name}{index}": value for name, value in given.items()}
        values |= named
        inputs += [
            helper.make_tensor_value_info(name, TYPES[value.dtype], tuple(value.shape)) for name, value in named.items()
        ]
        made = [f"{name}{index}" for name in outputs]
        nodes.append(helper.make_node(operator, list(named), made, domain=DOMAIN, **attributes))
        results += [
            helper.make_tensor_value_info(name, *each) for name, each in zip(made, outputs.values(), strict=True)
        ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "products", inputs, results)
    return Captured(helper.make_model(graph, opset_imports=opsets, ir_version=8), library, values)


def to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of int8 and their scales."""
    scales = values.abs().amax(1, keepdim=True) / LARGEST
    return (values / scales).round().to(torch.int8), scales.flatten()


def measure(size: str, library: Path) -> dict[str, Any]:
    rows, k, n = map(int, size.split("x"))
    operands: list[Named] = []
    halves = []
    for _ in range(COUNT):
        x, weight = torch.randn(rows, k, device="cuda"), torch.randn(n, k, device="cuda") / k**0.5
        (x8, sx), (w8, sw) = to_int8(x), to_int8(weight)
        bias = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
        operands.append({"x": x8, "sx": sx, "w": w8, "sw": sw, "bias": bias})
        halves.append((x.bfloat16(), weight.bfloat16()))
    runs: dict[str, Callable[[], Any]] = {}
    errors = {}

    def attempt(name: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            runs[name] = make()
        except Exception as error:  # noqa: BLE001  the others are measured all the same
            errors[name] = str(error)[:300]

    attempt("torch bfloat16", lambda: captured([lambda x=x, w=w: x @ w.t() for x, w in halves]))
    sums = [lambda each=each: torch._int_mm(each["x"], each["w"].t()) for each in operands]
    attempt("torch int8 sums", lambda: captured(sums))
    for name, kernel in KERNELS.items():
        half = kernel == TURING
        result = {"y": (TensorProto.FLOAT16 if half else TensorProto.BFLOAT16, (rows, n))}
        given = [each | {"bias": each["bias"].half()} for each in operands] if half else operands
        called = library, f"Int8Product{'' if half else 'Bfloat16'}", given, result, {"kernel": kernel}
        attempt(f"int8, {name}", lambda called=called: session_run(*called))
    written = {"rows": (TensorProto.INT8, (rows, k)), "scales": (TensorProto.FLOAT, (rows,))}
    inputs = [{"x": x} for x, _ in halves]
    for name, rotation in (("rows", 0), ("rotated rows", 64)):
        attempt(
            name,
            lambda rotation=rotation: session_run(library, "Int8RowsBfloat16", inputs, written, {"rotation": rotation}),
        )
    exact = halves[0][0].float() @ halves[0][1].float().t()
    apart = {}
    for name, run in runs.items():
        if "rows" not in name:
            first = run()[0].float()
            first = first * operands[0]["sx"][:, None] * operands[0]["sw"] if "sums" in name else first
            apart[name] = float((first - exact).norm() / exact.norm())
    turns = [
        {name: microseconds(run, runs=RUNS, rest=REST) / COUNT for name, run in runs.items()} for _ in range(TURNS)
    ]
    took = {name: statistics.median(turn[name] for turn in turns) for name in runs}
    return {
        "microseconds": took,
        "teraflops": {name: 2 * rows * k * n / each / 1e6 for name, each in took.items() if "rows" not in name},
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
    begun = time.perf_counter()
    library = build([INT8])
    proved = prove(library, INT8)
    print(f"{len(proved)} cases of the proof, none wrong, in {time.perf_counter() - begun:.1f} s", flush=True)
    found = {}
    for size in options.sizes:
        each = found[size] = measure(size, library)
        words = [
            f"{name} {took:.1f} us"
            + (f" {each['teraflops'][name]:.0f} TFLOP/s ({each['apart'][name]:.1e})" if name in each["apart"] else "")
            for name, took in each["microseconds"].items()
        ]
        print(f"  {size}: {'; '.join(words)}", *(f"{name}: {why}" for name, why in each["errors"].items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()
    wrong = {
        size: {**each["errors"], **{name: apart for name, apart in each["apart"].items() if far_apart(name, apart)}}
        for size, each in found.items()
    }
    if any(wrong.values()):
        print("failed or wrong:", json.dumps({size: names for size, names in wrong.items() if names}, indent=1))
        sys.exit(1)


def far_apart(name: str, apart: float) -> bool:
    """Whether an int8 product is too far from float32, or not a number."""
    return "int8" in name and not apart <= FARTHEST


if __name__ == "__main__":
    main()
