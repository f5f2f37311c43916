"""Replace the computation of a transformer attention's query, key and value by the operator RotaryQkv.

It covers biases, RMS norms of heads, rotation, and the joining of two streams, between the products and
MultiHeadAttention, in float16 and bfloat16. It is matched by operators. Values with other readers are kept.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.nodes import attribute, refill
from sdflow.runtime.kernels.graph_index import Known
from sdflow.runtime.kernels.rotary_graph import BY_HEAD, BY_TOKEN, FLAT, Heads, Reader, Stream

VECTOR, SIZES = 8, (8, 16, 32, 64, 128, 256)
"""As in rotary_qkv.c: channels per thread; supported head sizes."""
PARTS = 3


@dataclass(frozen=True)
class Replacement:
    """Nodes to insert before the node whose first output is `at`. reads: its new first inputs; None: they replace it.
    values: value infos of new values."""

    nodes: tuple[Any, ...]
    at: str
    reads: tuple[str, ...] | None = None
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Attention:
    """An attention as it is matched.

    heads: the values of query, key and value, each with its layout.
    """

    heads: tuple[tuple[str, str], ...]
    count: int
    size: int


def replacements(graph: Any, known: Known) -> list[Replacement]:
    """Return the replacements for a graph of fixed sizes. known: all its values."""
    reader = Reader(graph, known)
    found = []
    for node in graph.node:
        if node.op_type == "MultiHeadAttention" and node.domain == "com.microsoft":
            each = _of_attention(node, reader)
        elif node.op_type == "Softmax" and node.domain in ("", "ai.onnx"):
            each = _of_softmax(node, reader)
        else:
            continue
        if each is not None:
            found.append(dataclasses.replace(each, nodes=(*_tables_for(each, reader), *each.nodes)))
    return found


def _tables_for(replacement: Replacement, reader: Reader) -> list[Any]:
    """Return the nodes that create tables for this replacement, unless an earlier one has them."""
    found: list[Any] = []
    for name in replacement.nodes[0].input:
        found += reader.unsigned.get(name, [])
        if name in reader.unsigned:
            reader.unsigned[name] = []
    return found


def replace(graph: Any, found: list[Replacement]) -> None:
    """Insert the replacements, and remove nodes that are no longer read."""
    wanted = {each.at: each for each in found}
    nodes, left = [], []
    for node in graph.node:
        each = wanted.get(node.output[0])
        if each is None:
            nodes.append(node)
            continue
        nodes += each.nodes
        if each.reads is None:
            left += node.input
            continue
        left += node.input[: len(each.reads)]
        for place, name in enumerate(each.reads):
            node.input[place] = name
        nodes.append(node)
    kept = _without_unread(nodes, left, {item.name for item in graph.output})
    refill(graph.node, kept)
    graph.value_info.extend(value for each in found for value in each.values)


def _without_unread(nodes: list[Any], left: list[str], outputs: set[str]) -> list[Any]:
    """Return the nodes without those whose results are no longer read. left: values that may be unread."""
    made = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    readers = Counter(name for node in nodes for name in node.input if name)
    gone: set[int] = set()
    while left:
        place = made.get(left.pop())
        if place is None or place in gone:
            continue
        if any(readers[name] or name in outputs for name in nodes[place].output if name):
            continue
        gone.add(place)
        readers.subtract(name for name in nodes[place].input if name)
        left += nodes[place].input
    return [node for place, node in enumerate(nodes) if place not in gone]


def _of_attention(node: Any, reader: Reader) -> Replacement | None:
    """Return RotaryQkv for a MultiHeadAttention whose heads are normed, rotated or joined from two streams."""
    given = [*node.input, "", "", "", ""]
    if not all(given[:PARTS]) or given[PARTS] or any(given[6:]) or any(node.output[1:]):
        return None  # a bias, or past keys
    count = int(attribute(node, "num_heads", 0))
    shapes = [reader.shape(name) for name in given[:PARTS]]
    if len(shapes[0]) != 3 or not count or any(len(shape) not in (3, 4) for shape in shapes[1:]):
        return None
    size = shapes[0][2] // count
    if any(count * size != (s[2] if len(s) == 3 else s[1] * s[3]) for s in shapes):
        return None
    orders = [FLAT if len(shape) == 3 else BY_HEAD for shape in shapes]
    attention = _Attention(tuple(zip(given[:PARTS], orders, strict=True)), count, size)
    found = _heads_of(attention, node.output[0], reader)
    return Replacement((found.node,), node.output[0], found.reads, found.values) if found else None


def _of_softmax(node: Any, reader: Reader) -> Replacement | None:
    """Return RotaryQkv and a MultiHeadAttention for an unfused attention, which avoids storing scores in memory."""
    import onnx

    ends = [reader.read_by(node.output[0], "MatMul")]
    for op_type in ("Transpose", "Reshape"):
        ends.append(ends[-1] and reader.read_by(ends[-1].output[0], op_type))
    product, transposed, folded = ends
    if folded is None or product.input[0] != node.output[0] or attribute(transposed, "perm", ()) != [0, 2, 1, 3]:
        return None
    shape, scores, bias = reader.shape(node.output[0]), node.input[0], ""
    if len(shape) != 4 or attribute(node, "axis", -1) not in (-1, 3):
        return None
    if added := reader.made_by(scores, "Add"):
        scores, bias = added.input if reader.made_by(added.input[0], "MatMul", "Mul", "Div") else reversed(added.input)
        axes = zip(reader.shape(bias)[:2], shape[:2], strict=False)
        if len(reader.shape(bias)) != 4 or any(axis not in (1, full) for axis, full in axes):
            return None
        if reader.shape(bias)[2:] != shape[2:] or reader.element(bias) != reader.element(product.input[1]):
            return None
    scores, scale = reader.scaled(scores)
    squares = reader.made_by(scores, "MatMul")
    if squares is None:
        return None
    (query, of_query), (key, of_key) = (reader.scaled(name) for name in squares.input)
    turned = reader.made_by(key, "Transpose")
    order = turned and {(0, 2, 3, 1): BY_TOKEN, (0, 1, 3, 2): BY_HEAD}.get(tuple(attribute(turned, "perm", ())))
    if not order or len(reader.shape(query)) != 4:
        return None
    images, count, tokens, size = reader.shape(query)
    if reader.shape(folded.output[0]) != [images, tokens, count * size]:
        return None
    heads = ((query, BY_HEAD), (turned.input[0], order), (product.input[1], BY_HEAD))
    name = folded.output[0]
    found = _heads_of(_Attention(heads, count, size), name, reader)
    if found is None:
        return None
    inputs = [*found.reads, "", "", bias] if bias else list(found.reads)
    attributes = {"num_heads": count, "scale": scale * of_query * of_key}
    made = onnx.helper.make_node("MultiHeadAttention", inputs, [name], name, domain="com.microsoft", **attributes)
    return Replacement((found.node, made), name, values=found.values)


@dataclass(frozen=True)
class _Found:
    """A RotaryQkv node, the attention's new inputs, and value infos of the node's outputs."""

    node: Any
    reads: tuple[str, ...]
    values: tuple[Any, ...]


def _heads_of(attention: _Attention, name: str, reader: Reader) -> _Found | None:
    """Return RotaryQkv for these heads, or None if it does not support them or gains nothing.

    name: prefix of its outputs' names.
    """
    import onnx

    count, size = attention.count, attention.size
    if size not in SIZES:
        return None
    query, key, value = (reader.heads(*each, count, size) for each in attention.heads)
    if query is None or key is None or value is None or not _fit((query, key, value), reader):
        return None
    if not query.tables and not query.streams[0].weight and len(query.streams) == 1:
        return None  # nothing to gain
    heads = [query, key, value]
    reads = [f"{name}_{part}" for part in ("query", "key", "value")]
    only = value.streams[0]
    if len(value.streams) == 1 and not only.bias and reader.shape(only.product)[2] == count * size:
        reads[2] = only.product  # unchanged
        heads = heads[:2]
    outputs = reads[: len(heads)]
    element, (images, _) = reader.element(only.product), reader.shape(only.product)[:2]
    tokens = sum(reader.shape(stream.product)[1] for stream in value.streams)
    values = [onnx.helper.make_tensor_value_info(each, element, [images, tokens, count * size]) for each in outputs]
    return _Found(_qkv_node(name, heads, outputs, count, size, reader), tuple(reads), tuple(values))


def _fit(heads: tuple[Heads, Heads, Heads], reader: Reader) -> bool:
    """Whether one node can compute all three."""
    query, key, value = heads
    if query.tables != key.tables or value.tables or any(stream.weight for stream in value.streams):
        return False
    if len({len(each.streams) for each in heads}) != 1:
        return False
    for streams in zip(*(each.streams for each in heads), strict=True):
        if len({tuple(reader.shape(stream.product)[:2]) for stream in streams}) != 1:
            return False
        if bool(streams[0].weight) != bool(streams[1].weight):
            return False
        if any(stream.column % VECTOR or reader.shape(stream.product)[2] % VECTOR for stream in streams):
            return False
    if len({stream.epsilon for each in heads for stream in each.streams if stream.weight}) > 1:
        return False
    return len({reader.element(name) for name in _names(heads)}) == 1 and _type_of(heads, reader) is not None


def _names(heads: tuple[Heads, ...]) -> list[str]:
    """Return all inputs of the node."""
    each = [
        name for one in heads for stream in one.streams for name in (stream.product, stream.bias, stream.weight) if name
    ]
    return each + [name for one in heads for name in one.tables]


def _type_of(heads: tuple[Heads, ...], reader: Reader) -> str | None:
    """Return the operator's name suffix for the heads' type."""
    return _ending(reader.element(heads[0].streams[0].product))


def _ending(element: int) -> str | None:
    import onnx

    return {onnx.TensorProto.FLOAT16: "", onnx.TensorProto.BFLOAT16: "Bfloat16"}.get(element)


def _qkv_node(name: str, heads: list[Heads], outputs: list[str], count: int, size: int, reader: Reader) -> Any:
    import onnx

    nothing = Stream("", 0, "", "", 0.0)
    inputs: list[str] = []
    columns: list[int] = []
    for place in range(2):
        streams = [each.streams[place] if place < len(each.streams) else nothing for each in heads]
        streams += [nothing] * (PARTS - len(streams))
        columns += [stream.column for stream in streams]
        inputs += [stream.product for stream in streams] + [stream.bias for stream in streams]
        inputs += [stream.weight for stream in streams[:2]]
    inputs += heads[0].tables
    while not inputs[-1]:
        inputs.pop()
    epsilon = max(stream.epsilon for stream in heads[0].streams)
    attributes: dict[str, Any] = {f"column{place}": column for place, column in enumerate(columns)}
    attributes |= {"num_heads": count, "head_size": size, "epsilon": float(epsilon)}
    op_type = f"RotaryQkv{_type_of(tuple(heads), reader)}"
    return onnx.helper.make_node(op_type, inputs, outputs, f"{name}_heads", domain=DOMAIN, **attributes)
