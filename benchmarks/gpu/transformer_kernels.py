"""Compare ONNX Runtime's nodes between the products of a transformer's block with sdflow's operators, at 1024x1024.

    python benchmarks/gpu/transformer_kernels.py [PART-OF-A-NAME ...] [NAME=VALUE,... ...]

Each is a captured graph of several with separate values, more than the L2 cache holds; both take turns. Prints median
microseconds of one, the memory traffic of sdflow's kernel and its rate, and the distance of the results in L2. First
the kernels are compiled and verified, as in a session. The rate of a copy is the upper bound. NAME=VALUE: other block
sizes than in `compilation.DEFINES`, such as RESIDUAL_HELD=2, each set in turn after those.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.captured import Captured, microseconds
from sdflow.runtime.kernels import compilation
from sdflow.runtime.kernels.compilation import DEFINES
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.replace import with_own_kernels
from sdflow.runtime.sessions.specialize import specialize

COUNT, TURNS, RUNS, REST = 6, 5, 4, 0.05
HALF, BRAIN = TensorProto.FLOAT16, TensorProto.BFLOAT16
TORCH = {HALF: torch.float16, BRAIN: torch.bfloat16}


class Graph:
    """Nodes one after another; inputs are values of the device."""

    def __init__(self, element: int) -> None:
        self.element = element
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.results: list[str] = []

    def __call__(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], f"n{len(self.nodes)}", domain=domain, **attributes))
        return name

    def input(self, *shape: int) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs[name] = shape
        return name

    def whole(self, *values: int) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def filled(self, size: int, value: float) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(helper.make_tensor(name, self.element, [size], [value] * size))
        return name

    def layer_norm(self, x: str, size: int) -> str:
        return self("LayerNormalization", x, self.filled(size, 1), self.filled(size, 0), epsilon=1e-6)

    def rms_norm(self, x: str, size: int) -> str:
        return self("SimplifiedLayerNormalization", x, self.input(size), epsilon=1e-5, axis=-1)

    def modulated(self, x: str, images: int, size: int, *, shift: bool = True) -> str:
        made = self("Mul", x, self.input(images, 1, size))
        return self("Add", made, self.input(images, 1, size)) if shift else made

    def biased(self, x: str, size: int) -> str:
        return self("Add", self.input(size), x)

    def gated_sum(self, x: str, branch: str, images: int, size: int) -> str:
        return self("Add", x, self("Mul", self.input(images, 1, size), branch))

    def gated(self, a: str, b: str) -> str:
        return self("Mul", self("Mul", a, self("Sigmoid", a)), b)

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "kernels",
            [helper.make_tensor_value_info(name, self.element, shape) for name, shape in self.inputs.items()],
            [helper.make_tensor_value_info(name, self.element, None) for name in self.results],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return specialize(helper.make_model(graph, opset_imports=opsets, ir_version=8), {})


def joint(
    g: Graph, rows: tuple[int, int], size: int, *, branches: int = 1, outputs: int = 1, bias: bool = True
) -> None:
    """Sums with gates, a layer normalization, modulations."""
    total = g.input(*rows, size)
    for _ in range(branches):
        branch = g.input(*rows, size)
        total = g.gated_sum(total, g.biased(branch, size) if bias else branch, rows[0], size)
    normal = g.layer_norm(total, size)
    g.results += [total] * bool(branches) + [g.modulated(normal, rows[0], size) for _ in range(outputs)]


def sandwich(g: Graph, rows: tuple[int, int], size: int) -> None:
    branch = g.rms_norm(g.input(*rows, size), size)
    total = g.gated_sum(g.input(*rows, size), branch, rows[0], size)
    g.results += [total, g.modulated(g.rms_norm(total, size), rows[0], size, shift=False)]


def gelu(g: Graph, rows: tuple[int, int], size: int) -> None:
    g.results.append(g("FastGelu", g.biased(g.input(*rows, size), size), domain="com.microsoft"))


def halves(g: Graph, rows: tuple[int, int], size: int, *, behind: int = 0, before: int = 0) -> None:
    both = g.input(*rows, behind + 2 * size)
    bounds = ((behind, behind + size), (behind + size, behind + 2 * size))
    made = g.gated(*(g("Slice", both, g.whole(first), g.whole(end), g.whole(2)) for first, end in bounds))
    g.results.append(g("Concat", g.input(*rows, before), made, axis=-1) if before else made)


def two(g: Graph, rows: tuple[int, int], size: int) -> None:
    g.results.append(g.gated(g.input(*rows, size), g.input(*rows, size)))


@dataclass(frozen=True)
class Case:
    """streams: how many values of the rows' size ours reads and writes."""

    name: str
    element: int
    rows: tuple[int, int]
    size: int
    streams: float
    make: Callable[..., None]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def gigabytes(self) -> float:
        return self.rows[0] * self.rows[1] * self.size * 2 * self.streams / 1e9


IMAGE, TEXT = (2, 4096), (2, 333)
CASES = (
    Case("sd35 image, gate, norm", HALF, IMAGE, 1536, 4, joint),
    Case("sd35 image, gate, norm, two modulations", HALF, IMAGE, 1536, 5, joint, (("outputs", 2),)),
    Case("sd35 image, two gates, norm", HALF, IMAGE, 1536, 5, joint, (("branches", 2),)),
    Case("sd35 image, norm, two modulations", HALF, IMAGE, 1536, 3, joint, (("branches", 0), ("outputs", 2))),
    Case("sd35 text, gate, norm", HALF, TEXT, 1536, 4, joint),
    Case("sd35 image, gelu", HALF, IMAGE, 6144, 2, gelu),
    Case("sd35 text, gelu", HALF, TEXT, 6144, 2, gelu),
    Case("sd35 image in bfloat16, gate, norm", BRAIN, IMAGE, 1536, 4, joint),
    Case("flux2 all, gate, norm", BRAIN, (1, 4608), 3072, 4, joint, (("bias", False),)),
    Case("flux2 text, gate, norm", BRAIN, (1, 512), 3072, 4, joint, (("bias", False),)),
    Case("flux2 image, gated", BRAIN, (1, 4096), 9216, 3, halves),
    Case("flux2 all, gated behind attention", BRAIN, (1, 4608), 9216, 3 + 2 / 3, halves,
         (("behind", 9216), ("before", 3072))),
    Case("z-image all, norm, gate, norm", BRAIN, (1, 4160), 3840, 4, sandwich),
    Case("z-image all, gated", BRAIN, (1, 4160), 10240, 3, two),
)  # fmt: skip


def measure(library: Path, case: Case) -> str:
    g = Graph(case.element)
    for _ in range(COUNT):
        case.make(g, case.rows, case.size, **dict(case.options))
    graph = g.model()
    ours = with_own_kernels(graph)
    if ours is None:
        return "is not found"
    given = {name: torch.randn(shape, device="cuda").to(TORCH[case.element]) for name, shape in g.inputs.items()}
    both = [Captured(each, library, given) for each in (graph, ours)]
    turns = [[microseconds(one, runs=RUNS, rest=REST) / COUNT for one in both] for _ in range(TURNS)]
    theirs, taken = (statistics.median(turn[i] for turn in turns) for i in range(2))
    apart = max(
        float((b.double() - a.double()).norm() / a.double().norm())
        for a, b in zip(both[0].results, both[1].results, strict=True)
    )
    rate = case.gigabytes / taken * 1e3
    nodes = len(ours.graph.node) // COUNT
    return (
        f"ONNX Runtime {theirs:.1f} us, ours {taken:.1f} ({taken / theirs:.2f}) in {nodes} node"
        f"; {case.gigabytes * 1e3:.0f} MB at {rate:.2f} TB/s; {apart:.1e} apart"
    )


def main() -> None:
    copied = torch.empty(64 << 20, dtype=torch.float16, device="cuda")
    source = torch.randn(64 << 20, device="cuda").half()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    copied.copy_(source)
    begin.record()
    for _ in range(10):
        copied.copy_(source)
    end.record()
    end.synchronize()
    print(
        f"{torch.cuda.get_device_name()}, a copy: {10 * 2 * source.nbytes / begin.elapsed_time(end) / 1e9:.2f} TB/s",
        flush=True,
    )
    texts = [text for text in sys.argv[1:] if "=" not in text]
    for setting in ("", *(text for text in sys.argv[1:] if "=" in text)):
        given = dict(each.split("=") for each in setting.split(",") if each)
        compilation.DEFINES = DEFINES | {name: int(value) for name, value in given.items()}
        begun = time.perf_counter()
        library = build()
        print(f"{setting or 'as shipped'}: compiled and proved in {time.perf_counter() - begun:.1f} s", flush=True)
        for case in CASES:
            if not texts or any(text in case.name for text in texts):
                print(f"  {case.name}: {measure(library, case)}", flush=True)


if __name__ == "__main__":
    main()
