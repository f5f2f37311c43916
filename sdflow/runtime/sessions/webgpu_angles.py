"""Compute sines and cosines on WebGPU to float32 precision.

WGSL allows `sin` and `cos` an absolute error of 2^-11 between -pi and pi, and any error outside. SwiftShader's are off by
1.9e-4 everywhere, which shows in a denoiser: timestep embeddings are sines and cosines of up to 1000, and the denoiser's
output was off by 9e-4. So the argument is reduced to [-pi, pi] and a polynomial is evaluated, with products and sums only, on
every adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from sdflow.onnx_model.nodes import refill

TURNS = {"Sin": 0.0, "Cos": 0.25}
"""Operator -> fraction of a turn that is added to the angle: cos(x) is sin(x + a quarter turn)."""
TERMS = 7
"""Terms of the polynomial, in odd powers: with 7 the error is below 1e-8."""
COARSE_BITS = 11
"""Bits of each of the first two parts of 2 pi: their products with up to 2**13 quarter turns (angles up to 12,800) are exact."""


def with_right_angles(model: Any) -> None:
    """Replace Sin and Cos of a ModelProto's main graph in place; subgraphs stay unchanged. Nodes with the same input share
    their computation. Without known types (`specialize` infers them), the model must have opset 15 or later."""
    graph = model.graph
    types = {item.name: item.type.tensor_type.elem_type for item in (*graph.input, *graph.value_info)}
    together: dict[str, list[Any]] = {}
    for node in graph.node:
        if node.op_type in TURNS and node.domain == "":
            together.setdefault(node.input[0], []).append(node)
    nodes = []
    for node in graph.node:
        if node.op_type not in TURNS or node.domain != "":
            nodes.append(node)
        elif node.input[0] in together:
            nodes += _chain(graph, together.pop(node.input[0]), types.get(node.input[0]))
    refill(graph.node, nodes)


def _chain(graph: Any, nodes: Sequence[Any], kind: int | None) -> list[Any]:
    """The nodes that replace `nodes`, which share an input; their results lie side by side along a new last axis. kind: the
    input's element type."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    name = f"{nodes[0].output[0]}_angle"  # a value's name: those of nodes need not be unique
    made: list[Any] = []

    def constant(value: Any, of: str, dtype: Any = np.float32) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), f"{name}_{of}"))
        return f"{name}_{of}"

    def node(operator: str, inputs: list[str], of: str, **attributes: Any) -> str:
        made.append(helper.make_node(operator, inputs, [f"{name}_{of}"], name=f"{name}_{of}", **attributes))
        return f"{name}_{of}"

    given, exact = nodes[0].input[0], kind == TensorProto.FLOAT
    wide = given if exact else node("Cast", [given], "wide", to=TensorProto.FLOAT)
    angle = node("Unsqueeze", [wide, constant([-1], "axis", np.int64)], "apart")
    added = constant([TURNS[each.op_type] for each in nodes], "turns")
    # Floor of a half more: the provider has no kernel for Round.
    above = constant([TURNS[each.op_type] + 0.5 for each in nodes], "turns_and_half")
    turns = node("Add", [node("Mul", [angle, constant(1 / math.tau, "per_turn")], "in_turns"), above], "with_turns")
    whole = node("Sub", [node("Floor", [turns], "rounded"), added], "whole")
    rest, left, parts = angle, math.tau, []
    for of in ("coarse", "middle"):
        unit = 2.0 ** (COARSE_BITS - math.frexp(left)[1])
        parts.append((of, math.floor(left * unit) / unit))
        left -= parts[-1][1]
    for of, part in (*parts, ("fine", left)):
        rest = node("Sub", [rest, node("Mul", [whole, constant(part, of)], f"{of}_turns")], f"less_{of}")
    square = node("Mul", [rest, rest], "square")
    first, *others = reversed(_coefficients())
    value = constant(first, "highest")
    for index, coefficient in enumerate(others):
        product = node("Mul", [value, square], f"product_{index}")
        value = node("Add", [product, constant(coefficient, f"term_{index}")], f"sum_{index}")
    sines = node("Mul", [value, rest], "sines")
    for index, each in enumerate(nodes):
        picked = [sines, constant(index, f"index_{index}", np.int64)]
        if exact:
            made.append(helper.make_node("Gather", picked, list(each.output), name=each.name, axis=-1))
            continue
        narrow = node("Gather", picked, f"picked_{index}", axis=-1)
        if kind is None:
            made.append(helper.make_node("CastLike", [narrow, given], list(each.output), name=each.name))
        else:
            made.append(helper.make_node("Cast", [narrow], list(each.output), name=each.name, to=kind))
    return made


@cache
def _coefficients() -> tuple[float, ...]:
    """Of sin(x) / x in powers of x squared, the lowest first: the least squares at Chebyshev's points of [-pi, pi]."""
    import numpy as np
    from numpy.polynomial import Chebyshev, Polynomial

    most = math.pi**2 * 1.01
    points = (np.cos(np.pi * (np.arange(400) + 0.5) / 400) + 1) / 2 * most
    roots = np.sqrt(points)
    fitted = Chebyshev.fit(points, np.sin(roots) / roots, TERMS - 1, domain=[0, most])
    return tuple(float(each) for each in fitted.convert(kind=Polynomial).coef)
