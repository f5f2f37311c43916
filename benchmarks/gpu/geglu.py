"""Compare a product and its gate in ONNX Runtime at the sizes of the UNets: MatMul and BiasSplitGelu against Geglu.

    python benchmarks/gpu/geglu.py [ROWSxDEPTHxCOLUMNS ...]

COLUMNS: of the weights, half of them gates. Both use sdflow's kernels in a captured graph of several products with
separate weights, more than the L2 cache holds, and take turns. Prints median microseconds of one, and the distance of
the results.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.captured import Captured, microseconds
from sdflow.runtime.kernels.hopper import on_hopper
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.replace import with_own_kernels

SHAPES = (  # SDXL's at batch 2 and 1024x1024; at 512x512, of SD 1.5's: batch 2, 16 and 1
    (2048, 1280, 10240), (8192, 640, 5120),
    (8192, 320, 2560), (2048, 640, 5120), (512, 1280, 10240), (128, 1280, 10240),
    (65536, 320, 2560), (16384, 640, 5120), (4096, 1280, 10240), (1024, 1280, 10240),
    (4096, 320, 2560), (1024, 640, 5120), (256, 1280, 10240), (64, 1280, 10240),
)  # fmt: skip
HELD = 200 << 20
"""Bytes of weights."""
MOST, TURNS, RUNS, REST = 16, 5, 4, 0.05


def model(rows: int, depth: int, columns: int, count: int) -> onnx.ModelProto:
    """`count` products of x with their gates, each with weights of its own."""
    half, inputs = TensorProto.FLOAT16, [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [rows, depth])]
    nodes, weights, between, results = [], [], [], []
    random: dict[str, Any] = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
    for i in range(count):
        weight = (torch.randn(depth, columns, **random) / depth**0.5).half().cpu().numpy()
        bias = torch.randn(columns, **random).half().cpu().numpy()
        weights += [numpy_helper.from_array(weight, f"w{i}"), numpy_helper.from_array(bias, f"b{i}")]
        nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"h{i}"], f"product{i}"))
        nodes.append(
            helper.make_node("BiasSplitGelu", [f"h{i}", f"b{i}"], [f"y{i}"], f"gate{i}", domain="com.microsoft")
        )
        between.append(helper.make_tensor_value_info(f"h{i}", half, [rows, columns]))
        results.append(helper.make_tensor_value_info(f"y{i}", half, [rows, columns // 2]))
    graph = helper.make_graph(nodes, "gated", inputs, results, weights, value_info=between)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def measure(library: Path, rows: int, depth: int, columns: int) -> str:
    count = max(4, min(MOST, HELD // (depth * columns * 2)))
    graph = model(rows, depth, columns, count)
    x = torch.randn(rows, depth, device="cuda").half()
    ways: list[Any] = [with_own_kernels(graph, hopper=hopper) for hopper in (False, True)]
    if all(node.op_type != "Geglu" for node in ways[1].graph.node):
        return "stays a product and BiasSplitGelu"
    both = [Captured(way, library, {"x": x}) for way in ways]
    turns = [[microseconds(one, runs=RUNS, rest=REST) / count for one in both] for _ in range(TURNS)]
    apart, gated = (statistics.median(turn[i] for turn in turns) for i in range(2))
    expected, found = (one.results[-1].double() for one in both)
    distance = float((found - expected).norm() / expected.norm())
    return f"MatMul and BiasSplitGelu {apart:.1f} us, Geglu {gated:.1f} ({gated / apart:.2f}); {distance:.1e} apart"


def main() -> None:
    if not on_hopper():
        raise SystemExit("Geglu is for GPUs of compute capability 9.0")
    library = build()
    given = [tuple(int(size) for size in text.split("x")) for text in sys.argv[1:]]
    for shape in given or SHAPES:
        rows, depth, columns = shape
        print(f"{rows}x{depth}x{columns}: {measure(library, rows, depth, columns)}", flush=True)


if __name__ == "__main__":
    main()
