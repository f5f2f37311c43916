"""Blocks of diffusion transformers as graphs, small and with a sum in the place of attention, and what our operators in them are
by their definition, written out in operators of ONNX, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.transformer_definitions import RESIDUAL_INPUTS
from sdflow.runtime.sessions.specialize import specialize

C, IMAGES, TOKENS = 64, 2, 5
MICROSOFT = "com.microsoft"


class Graph:
    """Nodes one after another, each with one output."""

    def __init__(self, element: int = TensorProto.FLOAT16) -> None:
        self.element = element
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: dict[str, list[int]] = {}
        self.random = np.random.default_rng(0)

    def __call__(self, op_type: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, f"n{len(self.nodes)}", domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def input(self, *shape: int) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs[name] = list(shape)
        return name

    def constant(self, values: Any) -> str:
        name = f"c{len(self.constants)}"
        array = np.asarray(values)
        element = self.element if array.dtype.kind == "f" else TensorProto.INT64
        self.constants.append(helper.make_tensor(name, element, array.shape, array.ravel()))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.random.normal(size=shape) / (shape[0] ** 0.5 if len(shape) > 1 else 1))

    def product(self, x: str, depth: int, width: int, *, bias: bool = True) -> str:
        made = self("MatMul", x, self.weight(depth, width))
        return self("Add", self.weight(width), made) if bias else made

    def part(self, x: str, first: int, end: int, axis: int = -1) -> str:
        return self("Slice", x, *(self.constant(np.array([value])) for value in (first, end, axis)))

    def row(self, modulation: str, number: int, *, one: bool = False) -> str:
        """The number-th C channels as a row for each image; 1 + them."""
        made = self("Unsqueeze", self.part(modulation, number * C, number * C + C, 1), self.constant(np.array([1])))
        return self("Add", made, self.constant(np.array(1.0))) if one else made

    def layer_norm(self, x: str) -> str:
        return self("LayerNormalization", x, self.constant(np.ones(C)), self.constant(np.zeros(C)), epsilon=1e-6)

    def rms_norm(self, x: str) -> str:
        return self("SimplifiedLayerNormalization", x, self.weight(C), epsilon=1e-5, axis=-1, stash_type=1)

    def modulated(self, x: str, scale: str, shift: str) -> str:
        return self("Add", self("Mul", x, scale), shift)

    def gated_sum(self, x: str, gate: str, branch: str) -> str:
        return self("Add", x, self("Mul", gate, branch))

    def gated(self, a: str, b: str) -> str:
        return self("Mul", self("Mul", a, self("Sigmoid", a)), b)

    def attention(self, x: str, *, bias: bool = True) -> str:
        q, k, v = (self.product(x, C, C, bias=bias) for _ in range(3))
        return self.product(self("Add", q, self("Add", k, v)), C, C, bias=bias)

    def model(self, *results: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "test",
            [helper.make_tensor_value_info(name, self.element, shape) for name, shape in self.inputs.items()],
            [helper.make_tensor_value_info(name, self.element, None) for name in results],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return specialize(helper.make_model(graph, opset_imports=opsets, ir_version=8), {})


def joint_block(g: Graph) -> str:
    """As of SD3.5's: all biases, one product for nine rows, two attentions of one norm."""
    x, modulation = g.input(IMAGES, TOKENS, C), g.product(g.input(IMAGES, 32), 32, 9 * C)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = (
        g.row(modulation, i, one=i in (1, 4, 7)) for i in range(9)
    )
    normal = g.layer_norm(x)
    first, second = g.modulated(normal, scale, shift), g.modulated(normal, scale2, shift2)
    y = g.gated_sum(x, gate, g.attention(first))
    y = g.gated_sum(y, gate2, g.attention(second))
    hidden = g.product(g.modulated(g.layer_norm(y), scale_mlp, shift_mlp), C, 4 * C)
    y = g.gated_sum(y, gate_mlp, g.product(g("FastGelu", hidden, domain=MICROSOFT), 4 * C, C))
    return g.product(g.modulated(g.layer_norm(y), scale, shift), C, 16)


def parallel_block(g: Graph) -> str:
    """As of FLUX.2's: no biases, rows for all images, halves of one product gated; attention and network side by side."""
    x, rows = g.input(1, TOKENS, C), [g.input(1, 1, C) for _ in range(6)]
    y = g.gated_sum(x, rows[0], g.attention(g.modulated(g.layer_norm(x), rows[1], rows[2]), bias=False))
    hidden = g.product(g.modulated(g.layer_norm(y), rows[1], rows[2]), C, 6 * C, bias=False)
    gated = g.gated(g.part(hidden, 0, 3 * C), g.part(hidden, 3 * C, 6 * C))
    y = g.gated_sum(y, rows[0], g.product(gated, 3 * C, C, bias=False))
    y = g("Concat", g.input(1, 2, C), y, axis=1)
    all_at_once = g.product(g.modulated(g.layer_norm(y), rows[3], rows[4]), C, 9 * C, bias=False)
    sizes = g.constant(np.array([C, C, C, 6 * C]))
    q, k, v, hidden = g("Split", all_at_once, sizes, axis=-1, outputs=4)
    gated = g.gated(g.part(hidden, 0, 3 * C), g.part(hidden, 3 * C, 6 * C))
    both = g("Concat", g("Add", q, g("Add", k, v)), gated, axis=-1)
    y = g.gated_sum(y, rows[5], g.product(both, 4 * C, C, bias=False))
    return g.modulated(g.layer_norm(g.part(y, 2, 2 + TOKENS, 1)), rows[3], rows[4])


def sandwich_block(g: Graph) -> str:
    """As of Z-Image's: RMS norms before and behind what is added, no shifts."""
    x, rows = g.input(1, TOKENS, C), [g.input(1, 1, C) for _ in range(4)]
    y = g.gated_sum(x, rows[0], g.rms_norm(g.attention(g("Mul", g.rms_norm(x), rows[1]), bias=False)))
    first = g("Mul", g.rms_norm(y), rows[2])
    gated = g.gated(g.product(first, C, 3 * C, bias=False), g.product(first, C, 3 * C, bias=False))
    y = g.gated_sum(y, rows[3], g.rms_norm(g.product(gated, 3 * C, C, bias=False)))
    return g.product(g("Mul", g.layer_norm(y), rows[1]), C, 16)


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with what our operators are by their definition."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    shapes = {item.name: [axis.dim_value for axis in item.type.tensor_type.shape.dim] for item in made.graph.value_info}
    shapes |= {item.name: [axis.dim_value for axis in item.type.tensor_type.shape.dim] for item in made.graph.input}
    nodes = [copy for node in made.graph.node for copy in _expanded(node, made.graph, shapes)]
    del made.graph.node[:], made.graph.value_info[:]
    made.graph.node.extend(nodes)
    return made


def _expanded(node: Any, graph: Any, shapes: dict[str, list[int]]) -> list[Any]:
    if node.domain != DOMAIN:
        return [node]
    nodes: list[Any] = []
    given = {item.name: helper.get_attribute_value(item) for item in node.attribute}

    def op(op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{node.name}/{len(nodes)}"
        nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name

    def constant(values: Any) -> str:
        name = f"{node.name}/c{len(graph.initializer)}"
        graph.initializer.append(numpy_helper.from_array(np.array(values), name))
        return name

    def columns(name: str, first: int, width: int) -> str:
        bounds = (constant([first]), constant([first + width]), constant([-1]))
        return op("Slice", op("Cast", name, to=TensorProto.FLOAT), *bounds)

    def rms(value: str, epsilon: float) -> str:
        squares = op("ReduceMean", op("Mul", value, value), axes=[-1])
        return op("Div", value, op("Sqrt", op("Add", squares, constant(np.float32(epsilon)))))

    if node.op_type in ("SiluGated", "TanhGelu"):
        names = dict(zip(("a", "b", "a_bias", "b_bias", "before"), node.input, strict=False))
        width = given["channels"]
        a, b = (columns(names[key], given[key], width) if names.get(key) else "" for key in "ab")
        a, b = (
            op("Add", value, op("Cast", names[f"{key}_bias"], to=TensorProto.FLOAT))
            if names.get(f"{key}_bias")
            else value
            for key, value in (("a", a), ("b", b))
        )
        if node.op_type == "SiluGated":
            y = op("Mul", op("Div", a, op("Add", constant(np.float32(1)), op("Exp", op("Neg", a)))), b)
        else:
            cube = op("Mul", op("Mul", op("Mul", a, a), a), constant(np.float32(0.044715)))
            inner = op("Tanh", op("Mul", op("Add", a, cube), constant(np.float32((2 / np.pi) ** 0.5))))
            y = op("Mul", op("Mul", a, constant(np.float32(0.5))), op("Add", inner, constant(np.float32(1))))
        if names.get("before"):
            y = op("Concat", op("Cast", names["before"], to=TensorProto.FLOAT), y, axis=-1)
        nodes.append(helper.make_node("Cast", [y], [node.output[0]], to=TensorProto.FLOAT16))
        return nodes
    names = {key: name for key, name in zip(RESIDUAL_INPUTS, node.input, strict=False) if name}
    width = shapes[names["x"]][-1]

    def read(key: str) -> str:
        value = columns(names[key], given.get(key, 0), width)
        if key in ("x", "branch", "branch2"):
            return value
        return op("Reshape", value, constant([-1, 1, width]))

    total = read("x")
    for number in ("", "2"):
        if f"branch{number}" not in names:
            continue
        value = read(f"branch{number}")
        if f"branch{number}_bias" in names:
            value = op("Add", value, read(f"branch{number}_bias"))
        if f"branch{number}_gamma" in names:
            value = op("Mul", rms(value, given["branch_epsilon"]), read(f"branch{number}_gamma"))
        if f"gate{number}" in names:
            value = op("Mul", value, read(f"gate{number}"))
        total = op("Add", total, value)
    normal = total
    if given["norm"] == 1:
        normal = op("Sub", normal, op("ReduceMean", normal, axes=[-1]))
    if given["norm"]:
        normal = rms(normal, given["epsilon"])
    if "gamma" in names:
        normal = op("Mul", normal, read("gamma"))
    if "beta" in names:
        normal = op("Add", normal, read("beta"))
    results = []
    for bit, number in enumerate(("", "2")):
        value = normal
        if f"scale{number}" in names:
            scale = read(f"scale{number}")
            if given["plus_one"] >> bit & 1:
                scale = op("Add", scale, constant(np.float32(1)))
            value = op("Mul", value, scale)
        if f"shift{number}" in names:
            value = op("Add", value, read(f"shift{number}"))
        results.append(value)
    if node.op_type == "GatedResidual":
        results = [total]
    elif node.op_type == "GatedResidualNorm":
        results.insert(1, total)
    for value, name in zip(results, node.output, strict=False):
        nodes.append(helper.make_node("Cast", [value], [name], to=TensorProto.FLOAT16))
    return nodes
