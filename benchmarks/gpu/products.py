"""Compare float8 or int8 products at the sizes of transformers and UNets: PyTorch's, and sdflow's operators.

    python benchmarks/gpu/products.py float8 [ROWSxKxN ...] [--json FILE]
    python benchmarks/gpu/products.py int8 [ROWSxKxN ...] [--json FILE]

Prints microseconds and TFLOP/s (TOP/s), medians of turns. Both kinds: torch.matmul in bfloat16. float8: torch._scaled_mm
with row and column scales, and Float8ProductBfloat16 with cuBLASLt, with sdflow's tiles, and with its tiles and
alternating warpgroups. int8: torch._int_mm (int32 sums without scales), Int8ProductBfloat16 with wide tiles, narrow tiles
and those it chooses, Int8Product (float16) with the kernel for compute capability 7.5, and Int8RowsBfloat16, without and
with a rotation of 64. Each is a captured graph of several runs with separate values, more than the L2 cache holds. First
each library is compiled and verified. Distances are relative L2 to float32. The exit status is 1 if a library or a
product fails, or a product is too far from float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from onnx import TensorProto, helper

from benchmarks.gpu.captured import TYPES, Captured, microseconds
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels import compilation
from sdflow.runtime.kernels.compilation import DEFINES
from sdflow.runtime.kernels.int8_proof import ANY, NARROW, TURING, WIDE
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.parts import FLOAT8, INT8
from sdflow.runtime.kernels.proof import prove

COUNT, TURNS, RUNS, REST = 6, 5, 3, 0.02
INT8_KERNELS = {"chosen": ANY, "wide": WIDE, "narrow": NARROW, "for 7.5": TURING}

Named = dict[str, torch.Tensor]
Run = Callable[[], Any]


def session_run(
    library: Path,
    operator: str,
    operands: list[Named],
    outputs: Mapping[str, tuple[int, tuple[int, ...]]],
    attributes: Mapping[str, int] | None = None,
    spare: tuple[str, ...] = (),
) -> Run:
    """A captured session of one node for each of the operands. outputs: element types and shapes. spare: further outputs of
    the node, which nobody reads."""
    nodes, inputs, results, values = [], [], [], {}
    for index, given in enumerate(operands):
        named = {f"{name}{index}": value for name, value in given.items()}
        values |= named
        inputs += [
            helper.make_tensor_value_info(name, TYPES[value.dtype], tuple(value.shape)) for name, value in named.items()
        ]
        made = [f"{name}{index}" for name in (*outputs, *spare)]
        nodes.append(helper.make_node(operator, list(named), made, domain=DOMAIN, **(attributes or {})))
        results += [
            helper.make_tensor_value_info(name, *each) for name, each in zip(made, outputs.values(), strict=False)
        ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "products", inputs, results)
    return Captured(helper.make_model(graph, opset_imports=opsets, ir_version=8), library, values)


def captured(products: list[Callable[[], torch.Tensor]]) -> Run:
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


@dataclass
class Case:
    """A size, and values for several products of it: quantized, and in bfloat16."""

    rows: int
    k: int
    n: int
    operands: list[Named] = field(default_factory=list)
    halves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, size: str, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Case:
        case = cls(*map(int, size.split("x")))
        for _ in range(COUNT):
            x = torch.randn(case.rows, case.k, device="cuda")
            weight = torch.randn(case.n, case.k, device="cuda") / case.k**0.5
            (x8, sx), (w8, sw) = quantize(x), quantize(weight)
            case.operands.append({"x": x8, "sx": sx, "w": w8, "sw": sw})
            case.halves.append((x.bfloat16(), weight.bfloat16()))
        return case

    def exact(self) -> torch.Tensor:
        """The first product."""
        x, weight = self.halves[0]
        return x.float() @ weight.float().t()


def to_float8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of float8, as their bytes, and the scales."""
    scales = values.abs().amax(1, keepdim=True) / 448
    return (values / scales).to(torch.float8_e4m3fn).view(torch.uint8), scales.flatten()


def to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of int8 and their scales."""
    scales = values.abs().amax(1, keepdim=True) / 127
    return (values / scales).round().to(torch.int8), scales.flatten()


def scaled_mm(given: Named) -> torch.Tensor:
    """PyTorch's product in float8."""
    x8, w8 = (given[name].view(torch.float8_e4m3fn) for name in ("x", "w"))
    scales = given["sx"][:, None], given["sw"][None]
    return torch._scaled_mm(x8, w8.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def int8_sums(given: Named) -> torch.Tensor:
    return torch._int_mm(given["x"], given["w"].t())


def float8_ways(case: Case, libraries: Mapping[str, Path]) -> dict[str, Callable[[], Run]]:
    """Name -> what captures the products."""
    ways: dict[str, Callable[[], Run]] = {
        "torch float8": lambda: captured([partial(scaled_mm, given) for given in case.operands])
    }
    result = {"y": (TensorProto.BFLOAT16, (case.rows, case.n))}
    for name, library in libraries.items():
        ways[name] = partial(session_run, library, "Float8ProductBfloat16", case.operands, result, spare=("workspace",))
    return ways


def int8_ways(case: Case, libraries: Mapping[str, Path]) -> dict[str, Callable[[], Run]]:
    """The same; "rows" are no products."""
    (library,) = libraries.values()
    ways: dict[str, Callable[[], Run]] = {
        "torch int8 sums": lambda: captured([partial(int8_sums, given) for given in case.operands])
    }
    for name, kernel in INT8_KERNELS.items():
        half = kernel == TURING
        result = {"y": (TensorProto.FLOAT16 if half else TensorProto.BFLOAT16, (case.rows, case.n))}
        bias = torch.zeros(case.n, device="cuda", dtype=torch.float16 if half else torch.bfloat16)
        given = [each | {"bias": bias} for each in case.operands]
        operator = f"Int8Product{'' if half else 'Bfloat16'}"
        ways[f"int8, {name}"] = partial(session_run, library, operator, given, result, {"kernel": kernel})
    written = {"rows": (TensorProto.INT8, (case.rows, case.k)), "scales": (TensorProto.FLOAT, (case.rows,))}
    inputs = [{"x": x} for x, _ in case.halves]
    for name, rotation in (("rows", 0), ("rotated rows", 64)):
        ways[name] = partial(session_run, library, "Int8RowsBfloat16", inputs, written, {"rotation": rotation})
    return ways


@dataclass(frozen=True)
class Kind:
    """part: of the kernel library. libraries: name -> definitions that it is compiled with. farthest: maximum distance of a
    product from float32; 0.037 to 0.038 and 0.012 to 0.013 were measured. sizes: of klein, Z-Image, SD3.5-medium and, for
    int8, SDXL (two images of 1024 x 1024), several products of one value also as one."""

    part: str
    libraries: Mapping[str, Mapping[str, int]]
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ways: Callable[[Case, Mapping[str, Path]], dict[str, Callable[[], Run]]]
    farthest: float
    sizes: tuple[str, ...]


OURS = {"FLOAT8_MOST_DEPTH": 1 << 24, "FLOAT8_LEAST_FILLED": 0}
KINDS = {
    "float8": Kind(
        FLOAT8,
        {"cuBLASLt": {"FLOAT8_MOST_DEPTH": 0}, "ours": OURS, "ours in turns": {**OURS, "FLOAT8_IN_TURNS": 1}},
        to_float8,
        float8_ways,
        0.05,
        (
            *("4608x3072x27648", "4608x12288x3072", "4096x3072x3072", "4096x3072x9216", "4096x3072x18432"),
            *("4096x9216x3072", "512x3072x3072", "512x3072x9216", "512x3072x18432", "512x9216x3072"),
            *("4160x3840x3840", "4160x3840x11520", "4160x3840x10240", "4160x3840x20480", "4160x10240x3840"),
            *("8192x1536x1536", "8192x1536x4608", "8192x1536x6144", "8192x6144x1536"),
            *("666x1536x1536", "666x1536x4608", "666x1536x6144", "666x6144x1536"),
        ),
    ),
    "int8": Kind(
        INT8,
        {"int8": {}},
        to_int8,
        int8_ways,
        0.02,
        (
            *("4608x3072x27648", "4608x12288x3072", "4096x3072x3072", "4096x3072x9216", "4096x9216x3072"),
            *("512x3072x9216", "4160x3840x11520", "4160x3840x20480", "4160x10240x3840"),
            *("8192x1536x4608", "8192x1536x6144", "8192x6144x1536"),
            *("8192x640x5120", "8192x2560x640", "2048x1280x10240", "2048x5120x1280", "2048x1280x1280"),
        ),
    ),
}


def measure(kind: Kind, size: str, libraries: Mapping[str, Path]) -> dict[str, Any]:
    case = Case.of(size, kind.quantize)
    ways = {"torch bfloat16": lambda: captured([lambda x=x, w=w: x @ w.t() for x, w in case.halves])}
    runs: dict[str, Run] = {}
    errors, apart, exact = {}, {}, case.exact()
    for name, make in (ways | kind.ways(case, libraries)).items():
        try:
            runs[name] = make()
        except Exception as error:  # noqa: BLE001  the others are measured all the same
            errors[name] = str(error)[:300]
    for name, run in runs.items():
        if "rows" not in name:
            first = run()[0].float()
            if "sums" in name:
                first = first * case.operands[0]["sx"][:, None] * case.operands[0]["sw"]
            apart[name] = float((first - exact).norm() / exact.norm())
    turns = [
        {name: microseconds(run, runs=RUNS, rest=REST) / COUNT for name, run in runs.items()} for _ in range(TURNS)
    ]
    took = {name: statistics.median(turn[name] for turn in turns) for name in runs}
    operations = 2 * case.rows * case.k * case.n
    return {
        "microseconds": took,
        "teraflops": {name: operations / took[name] / 1e6 for name in apart},
        "apart": apart,
        "errors": errors,
    }


def compiled(kind: Kind) -> tuple[dict[str, Path], dict[str, str]]:
    """Libraries by name, and why others were not built."""
    libraries, failed = {}, {}
    for name, given in kind.libraries.items():
        begun = time.perf_counter()
        compilation.DEFINES = DEFINES | given
        try:
            libraries[name] = build([kind.part])
            cases = len(prove(libraries[name], kind.part))
            print(f"{name}: {cases} cases of the proof, none wrong, in {time.perf_counter() - begun:.1f} s", flush=True)
        except Exception as error:  # noqa: BLE001
            failed[name] = str(error)
            print(f"{name}: {error}", flush=True)
    return libraries, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("sizes", nargs="*", metavar="ROWSxKxN", help="default: all of the kind's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    kind = KINDS[options.kind]
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    libraries, failed = compiled(kind)
    if not libraries:
        sys.exit(1)
    wrong: dict[str, Any] = {"libraries": failed} if failed else {}
    found = {}
    for size in options.sizes or kind.sizes:
        each = found[size] = measure(kind, size, libraries)
        words = [
            f"{name} {took:.1f} us"
            + (f" {each['teraflops'][name]:.0f} TFLOP/s ({each['apart'][name]:.1e})" if name in each["apart"] else "")
            for name, took in each["microseconds"].items()
        ]
        print(f"  {size}: {'; '.join(words)}", *(f"{name}: {why}" for name, why in each["errors"].items()), flush=True)
        far = {name: apart for name, apart in each["apart"].items() if not apart <= kind.farthest}
        if far or each["errors"]:
            wrong[size] = {**each["errors"], **far}
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()
    if wrong:
        print("failed or wrong:", json.dumps(wrong, indent=1))
        sys.exit(1)


if __name__ == "__main__":
    main()
