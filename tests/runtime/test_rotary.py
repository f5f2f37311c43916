"""Attentions of transformers in operators of ours: what is found of a graph, and that it computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from sdflow.runtime.kernels.replace import DOMAIN, with_own_kernels
from sdflow.runtime.kernels.rotary_definitions import INPUTS, qkv_expected
from sdflow.runtime.kernels.transformer_definitions import ACTIVATION_INPUTS
from sdflow.runtime.sessions.specialize import specialize

IMAGES, TEXT, IMAGE, HEADS, SIZE = 2, 5, 12, 3, 16
WIDTH, HIDDEN = HEADS * SIZE, 64
SAME = 1e-5
"""Between two ways to compute in float32."""


class Net:
    """A graph as torch's exporter and ONNX Runtime's optimizer write attentions. Weights are random."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: dict[str, np.ndarray] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.random = np.random.default_rng(3)

    def input(self, name: str, *shape: int) -> str:
        self.inputs[name] = shape
        return name

    def weight(self, *shape: int, value: Any = None) -> str:
        name = f"weight{len(self.weights)}"
        self.weights[name] = self.random.normal(size=shape) if value is None else np.asarray(value)
        return name

    def add(self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        names = [f"value{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, names[0], domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def ints(self, *values: int) -> str:
        return self.weight(value=np.array(values, np.int64))

    def product(self, x: str, depth: int, width: int, bias: bool = False) -> str:
        y = self.add("MatMul", x, self.weight(depth, width))
        return self.add("Add", self.weight(width), y) if bias else y

    def folded(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, self.ints(*shape))

    def by_head(self, x: str) -> str:
        return self.add("Transpose", x, perm=[0, 2, 1, 3])

    def norm(self, x: str, epsilon: float = 1e-6) -> str:
        weight = self.weight(SIZE)
        return self.add("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=epsilon, stash_type=1)

    def attention(self, query: str, key: str, value: str, **attributes: Any) -> str:
        given = {"domain": "com.microsoft", "num_heads": HEADS, **attributes}
        return str(self.add("MultiHeadAttention", query, key, value, **given))

    def model(self, element: int, *outputs: str) -> onnx.ModelProto:
        kind = helper.tensor_dtype_to_np_dtype(element)
        initializers = [
            numpy_helper.from_array(value if value.dtype == np.int64 else value.astype(kind), name)
            for name, value in self.weights.items()
        ]
        inputs = [helper.make_tensor_value_info(name, element, shape) for name, shape in self.inputs.items()]
        results = [helper.make_tensor_value_info(name, element, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", inputs, results, initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return specialize(helper.make_model(graph, opset_imports=opsets, ir_version=8), {})


def split_pairs(net: Net, x: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Even and odd channels, by Split and Squeeze."""
    pairs = net.add("Split", net.folded(x, *shape[:3], -1, 2), net.ints(1, 1), outputs=2, axis=-1)
    even, odd = (net.add("Squeeze", each, net.ints(-1)) for each in pairs)
    return even, odd


def sliced_pairs(net: Net, x: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """By Slice."""
    even, odd = (
        net.add("Slice", x, net.ints(start), net.ints((1 << 63) - 1), net.ints(3), net.ints(2)) for start in range(2)
    )
    return even, odd


def gathered_pairs(net: Net, x: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """By Gather."""
    pairs = net.folded(x, *shape[:3], -1, 2)
    even, odd = (net.add("Gather", pairs, net.weight(value=np.array(i, np.int64)), axis=-1) for i in range(2))
    return even, odd


def turned(net: Net, x: str, tables: tuple[str, str], shape: tuple[int, ...], pairs: Any) -> str:
    """x cosine + (-x1, x0, -x3, x2, ...) sine."""
    even, odd = pairs(net, x, shape)
    both = [net.add("Unsqueeze", each, net.ints(-1)) for each in (net.add("Neg", odd), even)]
    crossed = net.folded(net.add("Concat", *both, axis=-1), *shape[:3], -1)
    plain, other = (net.add("Mul", *each) for each in zip((x, crossed), tables, strict=True))
    return str(net.add("Add", plain, other))


def swapped(net: Net, x: str, tables: tuple[str, str]) -> str:
    """x cosine + (x1, x0, x3, x2, ...) sine, the signs in the sines: FLUX.1's own way."""
    crossed = net.add("Gather", x, net.ints(*(channel ^ 1 for channel in range(SIZE))), axis=-1)
    plain, other = (net.add("Mul", *each) for each in zip((x, crossed), tables, strict=True))
    return str(net.add("Add", plain, other))


def tables(net: Net, tokens: int, axes: tuple[int, ...]) -> list[tuple[str, str]]:
    """Cosines and sines with an axis of one for the images, and another at each of these places."""
    each = [net.add("Unsqueeze", net.input(name, tokens, SIZE), net.ints(0)) for name in ("cosine", "sine")]
    return [(net.add("Unsqueeze", each[0], net.ints(a)), net.add("Unsqueeze", each[1], net.ints(a))) for a in axes]


def two_streams(bias: bool, rotated: bool, image_first: bool) -> tuple[Net, list[str]]:
    """Text and image joined, split again behind the attention: SD3's blocks, and the first ones of FLUX."""
    net, joined = Net(), []
    tokens = {"text": TEXT, "image": IMAGE}
    names = list(reversed(tokens)) if image_first else list(tokens)
    found: dict[str, list[str]] = {part: [] for part in "qkv"}
    for name in names:
        x = net.input(name, IMAGES, tokens[name], WIDTH)
        for part in "qkv":
            y = net.folded(net.product(x, WIDTH, WIDTH, bias), IMAGES, -1, HEADS, SIZE)
            y = y if part == "q" else net.by_head(y)
            found[part].append(y if part == "v" else net.norm(y))
    joined = [net.add("Concat", *found[part], axis=1 if part == "q" else 2) for part in "qkv"]
    count = TEXT + IMAGE
    if rotated:
        by_token, by_head = tables(net, count, (2, 1))
        joined[0] = turned(net, joined[0], by_token, (IMAGES, count, HEADS), split_pairs)
        joined[1] = turned(net, joined[1], by_head, (IMAGES, HEADS, count), split_pairs)
    y = net.attention(net.folded(joined[0], 0, 0, -1), joined[1], joined[2])
    first = tokens[names[0]]
    ends = [(0, first), (first, (1 << 63) - 1)]
    outputs = [net.add("Slice", y, net.ints(a), net.ints(b), net.ints(1), net.ints(1)) for a, b in ends]
    return net, outputs


def packed(gate_second: bool = False) -> tuple[Net, list[str]]:
    """Query, key, value and a gated activation of one product, joined again: FLUX.2's later blocks."""
    net = Net()
    x = net.input("x", IMAGES, IMAGE, WIDTH)
    y = net.product(x, WIDTH, 3 * WIDTH + 2 * HIDDEN)
    sizes = net.ints(WIDTH, WIDTH, WIDTH, 2 * HIDDEN)
    query, key, value, rest = net.add("Split", y, sizes, outputs=4, axis=-1)
    query, key, value = (net.folded(each, IMAGES, -1, HEADS, SIZE) for each in (query, key, value))
    by_token, by_head = tables(net, IMAGE, (2, 1))
    query = turned(net, net.norm(query), by_token, (IMAGES, IMAGE, HEADS), split_pairs)
    key = turned(net, net.norm(net.by_head(key)), by_head, (IMAGES, HEADS, IMAGE), gathered_pairs)
    attended = net.attention(net.folded(query, 0, 0, -1), key, net.by_head(value))
    ends = [(0, HIDDEN), (HIDDEN, 2 * HIDDEN)]
    a, b = (net.add("Slice", rest, net.ints(start), net.ints(end), net.ints(-1)) for start, end in ends)
    gate, other = (b, a) if gate_second else (a, b)
    gated = net.add("Mul", net.add("Mul", gate, net.add("Sigmoid", gate)), other)
    return net, [net.add("Concat", attended, gated, axis=-1)]


def three_products() -> tuple[Net, list[str]]:
    """A product with a bias each, of one stream: FLUX.1's later blocks."""
    net = Net()
    x = net.input("x", IMAGES, IMAGE, WIDTH)
    query, key, value = (
        net.by_head(net.folded(net.product(x, WIDTH, WIDTH, bias=True), IMAGES, -1, HEADS, SIZE)) for _ in range(3)
    )
    (by_head,) = tables(net, IMAGE, (1,))
    shape = (IMAGES, HEADS, IMAGE)
    query, key = (turned(net, net.norm(each), by_head, shape, gathered_pairs) for each in (query, key))
    return net, [net.attention(net.folded(net.by_head(query), 0, 0, -1), key, value)]


def signed_sines(names: str) -> tuple[Net, list[str]]:
    """An attention for each name, which all read one table of signed sines."""
    net, outputs = Net(), []
    ((cosine, sine),) = tables(net, IMAGE, (2,))
    for name in names:
        x = net.input(name, IMAGES, IMAGE, WIDTH)
        heads = [net.folded(net.product(x, WIDTH, WIDTH, bias=True), IMAGES, IMAGE, HEADS, -1) for _ in range(3)]
        query, key = (swapped(net, net.norm(each), (cosine, sine)) for each in heads[:2])
        outputs.append(net.attention(net.folded(query, 0, 0, -1), net.by_head(key), net.by_head(heads[2])))
    return net, outputs


def by_softmax(biased: bool) -> tuple[Net, list[str]]:
    """Scores in memory, with a bias: Z-Image's blocks."""
    net = Net()
    x = net.input("x", IMAGES, IMAGE, WIDTH)
    heads = [net.folded(net.product(x, WIDTH, WIDTH), IMAGES, IMAGE, HEADS, -1) for _ in range(3)]
    ((cosine, sine),) = tables(net, IMAGE, (2,))
    shape = (IMAGES, IMAGE, HEADS)
    query, key = (turned(net, net.norm(each, 1e-5), (cosine, sine), shape, sliced_pairs) for each in heads[:2])
    scale = net.weight(value=0.625)  # of all types
    query = net.add("Mul", net.by_head(query), scale)
    key = net.add("Mul", net.add("Transpose", key, perm=[0, 2, 3, 1]), scale)
    scores = net.add("MatMul", query, key)
    if biased:
        scores = net.add("Add", scores, net.input("bias", 1, 1, IMAGE, IMAGE))
    y = net.add("MatMul", net.add("Softmax", scores, axis=-1), net.by_head(heads[2]))
    return net, [net.folded(net.by_head(y), IMAGES, IMAGE, -1)]


KINDS = {
    "SD3": (
        two_streams(bias=True, rotated=False, image_first=True),
        {"RotaryQkv": 1, "MultiHeadAttention": 1, "Slice": 2},
    ),
    "FLUX": (
        two_streams(bias=True, rotated=True, image_first=False),
        {"RotaryQkv": 1, "MultiHeadAttention": 1, "Slice": 2},
    ),
    "FLUX, one stream": (three_products(), {"RotaryQkv": 1, "MultiHeadAttention": 1}),
    "FLUX, swapped": (signed_sines("x"), {"RotaryQkv": 1, "MultiHeadAttention": 1, "Constant": 1, "Mul": 1}),
    "FLUX, one table": (signed_sines("xy"), {"RotaryQkv": 2, "MultiHeadAttention": 2, "Constant": 1, "Mul": 1}),
    "FLUX.2, packed": (packed(), {"RotaryQkv": 1, "MultiHeadAttention": 1, "SiluGated": 1}),
    "the other gate": (packed(gate_second=True), {"RotaryQkv": 1, "MultiHeadAttention": 1, "SiluGated": 1}),
    "Z-Image": (by_softmax(biased=True), {"RotaryQkv": 1, "MultiHeadAttention": 1}),
    "no bias": (by_softmax(biased=False), {"RotaryQkv": 1, "MultiHeadAttention": 1}),
}
"""What -> a graph and its outputs; what is left of it besides products, and the tables' Unsqueeze."""


class RotaryQkv(OpRun):
    op_domain = DOMAIN

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        feeds = {name: value for name, value in zip(INPUTS, inputs, strict=False) if value is not None}
        return tuple(each.astype(np.float32) for each in qkv_expected(feeds, attributes))


class SiluGated(OpRun):
    op_domain = DOMAIN

    def _run(self, *inputs: Any, channels: int = 0, a: int = 0, b: int = 0) -> tuple[np.ndarray]:
        given = dict(zip(ACTIVATION_INPUTS, inputs, strict=False))
        gate, value = (given[name][..., first : first + channels] for name, first in (("a", a), ("b", b)))
        return (np.concatenate([given["before"], value * gate / (1 + np.exp(-gate))], -1).astype(np.float32),)


class MultiHeadAttention(OpRun):
    op_domain = "com.microsoft"

    def _run(self, *inputs: Any, num_heads: int = 0, scale: float = 0.0) -> tuple[np.ndarray]:
        shape = inputs[0].shape
        query, key, value = (x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2) for x in inputs[:3])
        scores = query @ key.swapaxes(2, 3) * (scale or 1 / np.sqrt(query.shape[-1]))
        scores = scores + inputs[5] if len(inputs) > 5 else scores
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        result = (weights / weights.sum(-1, keepdims=True)) @ value
        return (result.swapaxes(1, 2).reshape(shape).astype(np.float32),)


def feeds_of(net: Net) -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in net.inputs.items()}


def computed(net: Net, replaced: onnx.ModelProto, outputs: list[str]) -> list[np.ndarray]:
    """By the definitions of our operators, in float32."""
    whole = net.model(TensorProto.FLOAT, *outputs)
    del whole.graph.node[:], whole.graph.value_info[:]
    whole.graph.node.extend(replaced.graph.node)
    for node in whole.graph.node:
        node.op_type = node.op_type.removesuffix("Bfloat16")
        if node.op_type == "Constant":
            value = numpy_helper.to_array(node.attribute[0].t).astype(np.float32)
            node.attribute[0].t.CopyFrom(numpy_helper.from_array(value))
    del whole.opset_import[:]
    whole.opset_import.extend(replaced.opset_import)
    evaluator = ReferenceEvaluator(whole, new_ops=[RotaryQkv, SiluGated, MultiHeadAttention])
    return list(evaluator.run(outputs, feeds_of(net)))


@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_surrounds_attention_is_replaced_and_computes_the_same(kind: str, element: int) -> None:
    (net, outputs), wanted = KINDS[kind]
    replaced = with_own_kernels(net.model(element, *outputs))
    assert replaced is not None
    left = Counter(node.op_type.removesuffix("Bfloat16") for node in replaced.graph.node)
    assert {op_type: count for op_type, count in left.items() if op_type not in ("MatMul", "Unsqueeze")} == wanted
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    plain = net.model(TensorProto.FLOAT, *outputs).SerializeToString()
    session = onnxruntime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
    for found, expected in zip(computed(net, replaced, outputs), session.run(outputs, feeds_of(net)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=SAME, atol=10 * SAME)


def changed(kind: str, op_type: str, change: Callable[[Any], None]) -> onnx.ModelProto:
    """A graph of a kind, its first node of a type changed."""
    (net, outputs), _ = KINDS[kind]
    model = net.model(TensorProto.FLOAT16, *outputs)
    model.graph.initializer.append(numpy_helper.from_array(np.arange(SIZE), "pairs_kept"))
    change(next(node for node in model.graph.node if node.op_type == op_type))
    return model


def swap(node: Any) -> None:
    first, second = node.input
    node.input[0], node.input[1] = second, first


def set_epsilon(node: Any) -> None:
    next(item for item in node.attribute if item.name == "epsilon").f = 1e-3


@pytest.mark.parametrize(
    ("kind", "op_type", "change"),
    [
        ("FLUX", "SimplifiedLayerNormalization", set_epsilon),  # another one than the other heads
        ("FLUX", "Split", lambda node: node.output.reverse()),  # the even channels for the odd ones
        ("FLUX, one stream", "Concat", swap),  # (x0, -x1, ...)
        ("FLUX, swapped", "Gather", lambda node: node.input.__setitem__(1, "pairs_kept")),
        ("FLUX", "MultiHeadAttention", lambda node: node.input.append("weight1")),  # a bias of its own
        ("Z-Image", "Softmax", lambda node: node.attribute[0].__setattr__("i", 2)),
        ("SD3", "Transpose", lambda node: node.attribute[0].ints.__setitem__(slice(None), [0, 2, 3, 1])),
    ],
    ids=["epsilon", "pairs", "direction", "swap", "bias", "softmax", "transposed"],
)
def test_what_computes_something_else_is_left(kind: str, op_type: str, change: Callable[[Any], None]) -> None:
    assert with_own_kernels(changed(kind, op_type, change)) is None


def test_float32_is_left() -> None:
    for (net, outputs), _ in KINDS.values():
        assert with_own_kernels(net.model(TensorProto.FLOAT, *outputs)) is None


def test_what_others_read_is_still_there() -> None:
    net, outputs = packed()
    norm = next(node.output[0] for node in net.nodes if node.op_type == "SimplifiedLayerNormalization")
    replaced = with_own_kernels(net.model(TensorProto.FLOAT16, *outputs, norm))
    assert replaced is not None
    left = Counter(node.op_type for node in replaced.graph.node)
    assert left["SimplifiedLayerNormalization"] == left["RotaryQkv"] == 1
