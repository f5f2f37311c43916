"""Compare ONNX Runtime's nodes before a transformer's attention with RotaryQkv, for each kind of attention in a built
graph.

    python benchmarks/gpu/rotary.py transformer/model.onnx AXIS=SIZE...

A match spans from the products to the attention's output; the first of each shape is measured. No weights are needed,
as inputs are random. Both variants are captured graphs and take turns. Prints median microseconds, the number of
matches, and the distance of the results. The exit status is 1 if that exceeds rounding.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.captured import Captured, microseconds
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.kernels.hopper import on_hopper
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.replace import with_own_kernels
from sdflow.runtime.sessions.specialize import specialize

TYPES = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}
TURNS, RUNS, REST = 5, 5, 0.05
APART = {torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Each node of ONNX Runtime's rounds its result, and scores in memory are rounded too."""


@dataclass(frozen=True)
class Place:
    """What a graph has between these inputs and this output, without and with our operators."""

    name: str
    kind: str
    inputs: dict[str, Any]
    output: Any
    before: onnx.ModelProto
    after: onnx.ModelProto


def cut(graph: Any, inputs: dict[str, Any], output: Any) -> onnx.ModelProto:
    """The part of a graph that makes an output of these inputs."""
    made = {name: node for node in graph.node for name in node.output if name}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    left, taken, used = [output.name], set(), set()
    while left:
        name = left.pop()
        if name in inputs or not name:
            continue
        if name in constants:
            used.add(name)
        elif made[name].output[0] not in taken:
            taken.add(made[name].output[0])
            left += made[name].input
    nodes = [node for node in graph.node if node.output[0] in taken]
    within = [item for item in graph.value_info if item.name not in inputs and item.name != output.name]
    known = [item for item in within if item.name in {name for node in nodes for name in node.output}]
    initializers = [constants[name] for name in sorted(used)]
    part = helper.make_graph(nodes, "place", list(inputs.values()), [output], initializers, value_info=known)
    opsets = [("", 17), ("com.microsoft", 1), (DOMAIN, 1)]
    return helper.make_model(part, opset_imports=[helper.make_opsetid(*each) for each in opsets], ir_version=8)


def places(model: onnx.ModelProto) -> Iterator[Place]:
    replaced = with_own_kernels(model, hopper=on_hopper())
    if replaced is None:
        return
    known = {item.name: item for item in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    for tensor in model.graph.initializer:
        known[tensor.name] = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
    readers = {name: node for node in replaced.graph.node for name in node.input}
    for node in replaced.graph.node:
        if node.domain != DOMAIN or not node.op_type.startswith("RotaryQkv"):
            continue
        last = readers[node.output[0]]
        names = [name for name in dict.fromkeys([*node.input, *last.input]) if name and name not in node.output]
        inputs, output = {name: known[name] for name in names}, known[last.output[0]]
        before, after = (cut(graph, inputs, output) for graph in (model.graph, replaced.graph))
        yield Place(node.name, node.op_type, inputs, output, before, after)


def signature(place: Place) -> tuple[Any, ...]:
    operators = tuple(sorted(Counter(node.op_type for node in place.before.graph.node).items()))
    return place.kind, operators, tuple(tuple(shape_of(item)) for item in place.inputs.values())


def shape_of(item: Any) -> list[int]:
    return [axis.dim_value for axis in item.type.tensor_type.shape.dim]


def measure(place: Place, library: Path) -> tuple[list[float], float]:
    """Without and with our operators; the distance."""
    kind = TYPES[place.output.type.tensor_type.elem_type]
    torch.manual_seed(0)
    values = {}
    for name, item in place.inputs.items():
        shape = shape_of(item)
        values[name] = torch.randn(shape, device="cuda", dtype=torch.float32).to(kind)
    ways = [Captured(model, library, values) for model in (place.before, place.after)]
    turns = [[microseconds(way, runs=RUNS, rest=REST) for way in ways] for _ in range(TURNS)]
    expected, found = (way.results[0].double() for way in ways)
    distance = float((found - expected).norm() / expected.norm())
    return [statistics.median(turn[i] for turn in turns) for i in range(2)], distance


def main() -> None:
    path, *given = sys.argv[1:]
    sizes = {name: int(size) for name, size in (each.split("=") for each in given)}
    model = specialize(load_graph(Path(path)), sizes)
    found: dict[tuple[Any, ...], list[Place]] = {}
    for place in places(model):
        found.setdefault(signature(place), []).append(place)
    library, wrong, saved = build(), False, 0.0
    for several in found.values():
        place = several[0]
        (before, after), distance = measure(place, library)
        limit = APART[TYPES[place.output.type.tensor_type.elem_type]]
        wrong = wrong or math.isnan(distance) or distance > limit
        saved += (before - after) * len(several)
        nodes = len(place.before.graph.node)
        print(
            f"{len(several)} x {place.kind}, {place.name}: {nodes} nodes {before:.1f} us, "
            f"{len(place.after.graph.node)} nodes {after:.1f} us; {distance:.1e} apart",
            flush=True,
        )
    print(f"{saved / 1e3:.2f} ms less in all")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
