"""MultiHeadAttention and Attention.

Definitions: ONNX Runtime, docs/ContribOperators.md (the same text is in the wheel: `get_all_operator_schema()`).
Details that it omits are from onnxruntime/contrib_ops/cpu/bert: masks are added to the scaled scores
(attention_helper.h, PrepareMask); a causal mask replaces them by the lowest number (ibid.); the bias of
MultiHeadAttention has the order q, k, v, each (heads, head size) (multihead_attention_helper.h).

Heads are computed one by one: at 64x64 latents the scores of all heads together would take a gigabyte.
"""

from __future__ import annotations

import itertools

from sdflow.verify.lowering.builder import Builder, Node

LOWEST = -3.4028234663852886e38

_INT64 = 7


def multi_head_attention(b: Builder, node: Node) -> list[str]:
    """softmax(scale q k' + masks) v for each head; gives (B, S, heads times the size of v's heads).

    q, k and v are apart, as (B, S, D), (B, L, D) and (B, L, Dv), where k and v may also be (B, N, L, H); or k and v are
    packed (B, L, N, 2, H); or all three are (B, S, N, 3, H).
    """
    node.allow("mask_filter_value", "num_heads", "scale", "unidirectional")
    node.refuse_inputs({6: "past_key", 7: "past_value", 8: "past_sequence_length", 9: "cache_indirection"})
    if any(node.has_output(index) for index in (1, 2, 3)):
        raise node.error("only the first output is supported by the lowering")
    heads = int(node.required("num_heads"))
    if not node.has(1):
        q, k, v = _unpack(b, node, 0, 3)
    elif not node.has(2):
        q = _by_heads(b, node.input(0), heads)
        k, v = _unpack(b, node, 1, 2)
    elif b.rank(node.raw(1)) == 4:
        if node.has(3):
            raise node.error("a bias with keys of four dimensions is not supported by the lowering")
        q = _by_heads(b, node.input(0), heads)
        k, v = (b.op("Transpose", node.input(index), perm=[0, 2, 1, 3]) for index in (1, 2))
    else:
        q, k, v = (_by_heads(b, node.input(index), heads) for index in (0, 1, 2))
    if node.has(3):
        size = b.op("Slice", b.op("Shape", q), b.ints(3), b.ints(4))  # of a head of q, and of k
        width = b.op("Mul", size, b.ints(heads))
        ends = [b.ints(0), width, b.op("Add", width, width), b.op("Shape", node.raw(3))]
        parts = [b.op("Slice", node.input(3), start, end) for start, end in itertools.pairwise(ends)]
        shape = b.ints(heads, -1)
        q, k, v = (
            b.rounded(b.op("Add", x, b.op("Reshape", part, shape)), node.element_type)
            for x, part in zip((q, k, v), parts, strict=True)
        )
    return [_attend(b, node, q, k, v, mask=4, bias=5)]


def attention(b: Builder, node: Node) -> list[str]:
    """Attention with q, k and v = x weights + bias, x (B, S, I), weights (I, D + D + Dv), bias (D + D + Dv)."""
    node.allow("do_rotary", "mask_filter_value", "num_heads", "qkv_hidden_sizes", "scale", "unidirectional")
    node.refuse_inputs({4: "past", 6: "past_sequence_length"})
    if node.attribute("do_rotary", 0):
        raise node.error("rotary embedding is not supported by the lowering")
    if node.has_output(1):
        raise node.error("only the first output is supported by the lowering")
    heads = int(node.required("num_heads"))
    qkv = b.op("MatMul", node.input(0), node.input(1))
    if node.has(2):
        qkv = b.op("Add", qkv, node.input(2))
    qkv = b.rounded(qkv, node.element_type)
    sizes = node.attribute("qkv_hidden_sizes", None)
    if sizes is None:
        width = b.shape(node.raw(1))[-1]
        if not isinstance(width, int):
            raise node.error("the size of its weights is not known")
        sizes = [width // 3] * 3
    q, k, v = (_by_heads(b, x, heads) for x in b.split(qkv, -1, sizes))
    return [_attend(b, node, q, k, v, mask=3, bias=5)]


def _attend(b: Builder, node: Node, q: str, k: str, v: str, *, mask: int, bias: int) -> str:
    """Attention of q (B, S, N, H), k (B, L, N, H), v (B, L, N, Hv). mask and bias: the indices of those inputs."""
    heads = int(node.required("num_heads"))
    scale = float(node.attribute("scale", 0.0))
    if scale:
        q = b.op("Mul", q, b.scalar(scale))
    else:
        size = b.op("Cast", b.op("Slice", b.op("Shape", q), b.ints(3), b.ints(4)), to=1)
        q = b.op("Div", q, b.op("Sqrt", size))
    added = _mask(b, node, q, k, mask)
    biases = _bias_of_heads(b, node, bias, heads)
    one_each = [1] * heads
    outputs = []
    for q_head, k_head, v_head, bias_head in zip(
        b.split(b.op("Transpose", q, perm=[0, 2, 1, 3]), 1, one_each),
        b.split(b.op("Transpose", k, perm=[0, 2, 3, 1]), 1, one_each),
        b.split(b.op("Transpose", v, perm=[0, 2, 1, 3]), 1, one_each),
        biases,
        strict=True,
    ):
        scores = b.op("MatMul", q_head, k_head)
        for term in (bias_head, added):
            scores = scores if term is None else b.op("Add", scores, term)
        outputs.append(b.op("MatMul", b.op("Softmax", scores, axis=-1), v_head))
    together = b.op("Transpose", b.op("Concat", *outputs, axis=1), perm=[0, 2, 1, 3])
    return b.op("Reshape", together, b.ints(0, 0, -1))


def _mask(b: Builder, node: Node, q: str, k: str, index: int) -> str | None:
    """The addend of the mask and `unidirectional` for scores (B, 1, S, L); None without either."""
    batch, queries = (b.op("Slice", b.op("Shape", q), b.ints(axis), b.ints(axis + 1)) for axis in (0, 1))
    keys = b.op("Slice", b.op("Shape", k), b.ints(1), b.ints(2))
    position = b.op("Range", *(b.op("Squeeze", x) for x in (b.ints(0), keys, b.ints(1))))
    added = None
    if node.has(index):
        mask = b.op("Cast", node.raw(index), to=_INT64)
        kept = _kept(b, node, mask, b.rank(node.raw(index)), batch, queries, keys, position)
        added = b.op("Where", kept, b.scalar(0), b.scalar(node.attribute("mask_filter_value", -10000.0)))
    if node.attribute("unidirectional", 0):
        row = b.op("Range", *(b.op("Squeeze", x) for x in (b.ints(0), queries, b.ints(1))))
        later = b.op("Greater", position, b.op("Unsqueeze", row, b.ints(1)))
        added = b.op("Where", later, b.scalar(LOWEST), b.scalar(0) if added is None else added)
    return added


def _kept(b: Builder, node: Node, mask: str, rank: int, batch: str, queries: str, keys: str, position: str) -> str:
    """Which scores a mask keeps, broadcastable to (B, 1, S, L)."""
    zero = b.ints(0)
    if rank == 1:  # (B) ends, or (2B) ends and starts, or (3B + 2) of which the first B are ends
        ends = b.op("Slice", mask, zero, batch)
        twice = b.op("Add", batch, batch)
        starts = b.op("Slice", b.op("Concat", mask, ends, axis=0), batch, twice)
        are_starts = b.op("Cast", b.op("Equal", b.op("Shape", mask), twice), to=_INT64)
        ends, starts = (b.op("Unsqueeze", x, b.ints(1, 2, 3)) for x in (ends, b.op("Mul", starts, are_starts)))
        return b.op("And", b.op("Less", position, ends), b.op("Not", b.op("Less", position, starts)))
    if rank == 2:
        mask = b.op("Unsqueeze", mask, b.ints(1, 2))
    elif rank == 3:
        mask = b.op("Unsqueeze", mask, b.ints(1))
    elif rank == 4:  # (B, 1, longest, longest), of which these queries are the last rows
        rows = b.op("Slice", mask, b.op("Sub", keys, queries), keys, b.ints(2))
        mask = b.op("Slice", rows, zero, keys, b.ints(3))
    else:
        raise node.error(f"a mask with {rank} dimensions is not supported by the lowering")
    return b.op("Greater", mask, zero)


def _bias_of_heads(b: Builder, node: Node, index: int, heads: int) -> list[str] | list[None]:
    """attention_bias (B or 1, heads or 1, S, L) split by heads; Nones without it."""
    if not node.has(index):
        return [None] * heads
    if heads > 1:
        expanded = b.op("Expand", node.input(index), b.ints(1, heads, 1, 1))
        return b.split(expanded, 1, [1] * heads)
    return [node.input(index)]


def _by_heads(b: Builder, x: str, heads: int) -> str:
    """(B, S, heads times H) as (B, S, heads, H)."""
    return b.op("Reshape", x, b.ints(0, 0, heads, -1))


def _unpack(b: Builder, node: Node, index: int, count: int) -> list[str]:
    """(B, S, N, count, H) as `count` times (B, S, N, H)."""
    axis = b.ints(3)
    return [b.op("Squeeze", part, axis) for part in b.split(node.input(index), 3, [1] * count)]
