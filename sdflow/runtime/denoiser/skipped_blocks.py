"""A transformer's graph without some of its blocks: what comes into a block goes on as if it were what comes out.

A block adds to the streams of tokens that run through it, those of the image and those of the text, and to nothing else. So
its way in and its way out are found by following the sums: the operand that is not of the block, and the last sum of the block
that is made of it. Which block a value is of says its name, which fusions keep for what they do not take in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sdflow.errors import UsageError
from sdflow.onnx_model.nodes import copied


def without_blocks(model: Any, blocks: str, layers: Sequence[int], where: str) -> Any:
    """A copy of a denoiser's ModelProto that bypasses these blocks, without the nodes that only they need.

    blocks: the module list that they are members of. layers: their places in it. where: for messages.
    Raises UsageError for a block that the graph does not have, or whose sums are fused with something else.
    """
    made = copied(model)
    graph = made.graph
    present = re.compile(rf"/{re.escape(blocks)}\.(\d+)/")
    count = 1 + max((int(found[1]) for node in graph.node if (found := present.match(node.output[0]))), default=-1)
    replaced: dict[str, str] = {}
    for layer in layers:
        if layer >= count:
            raise UsageError(
                f"the denoiser has {count} blocks, and block {layer} is to be left out",
                where=where,
                remedy=f"They are counted from 0: take blocks up to {count - 1}." if count else "Draw without it.",
            )
        ways = _ways(graph, f"/{blocks}.{layer}/")
        if not ways:
            raise UsageError(
                f"where block {layer} of the denoiser begins and ends is not to be seen in its graph",
                where=where,
                remedy="Draw without it.",
            )
        replaced |= ways
    for node in graph.node:
        for place, name in enumerate(node.input):
            while name in replaced:
                name = replaced[name]
            node.input[place] = name
    _prune(graph)
    return made


def _ways(graph: Any, block: str) -> dict[str, str]:
    """For each stream that a block adds to: what comes out -> what comes in. block: how its values' names begin."""
    producers = {name: node for node in graph.node for name in node.output if name}
    weights = {tensor.name for tensor in graph.initializer}
    own_sum = re.compile(rf"{re.escape(block)}Add(_\d+)?_output_0")
    sums = [node for node in graph.node if node.op_type == "Add" and own_sum.fullmatch(node.output[0])]

    def origin(name: str) -> str:
        while (node := producers.get(name)) is not None and node.op_type == "Cast":
            name = node.input[0]
        return name

    def comes_in(name: str) -> bool:
        node = producers.get(name)
        return not name.startswith(block) and name not in weights and node is not None and node.op_type != "Constant"

    if any(
        node.op_type.startswith("Skip") and any(name.startswith(block) for name in (*node.input, *node.output))
        for node in graph.node
    ):
        return {}  # some of its sums are fused with a norm, its own or the next block's
    begins = {name: name for node in sums for name in map(origin, node.input) if comes_in(name)}
    for _ in sums:  # they may be in any order
        for node in sums:
            for name in map(origin, node.input):
                if name in begins:
                    begins[node.output[0]] = begins[name]
    return {last: begins[last] for last in _ends(sums, begins, origin)}


def _ends(sums: Sequence[Any], begins: dict[str, str], origin: Any) -> list[str]:
    """Of the sums that streams run through, those that no other sum of the block goes on from."""
    read = {origin(name) for node in sums for name in node.input}
    return [name for name in begins if name != begins[name] and name not in read]


def _prune(graph: Any) -> None:
    """Take out what no output needs. Nodes may be in any order: conversion to float16 or bfloat16 appends its casts."""
    producers = {name: node for node in graph.node for name in node.output if name}
    wanted, coming = set[str](), [item.name for item in graph.output]
    while coming:
        name = coming.pop()
        if name not in wanted:
            wanted.add(name)
            coming += producers[name].input if name in producers else ()
    kept = [copied(node) for node in graph.node if wanted.intersection(node.output)]
    initializers = [copied(tensor) for tensor in graph.initializer if tensor.name in wanted]
    values = {name for node in kept for name in node.output}
    infos = [copied(item) for item in graph.value_info if item.name in values]
    for field, items in ((graph.node, kept), (graph.initializer, initializers), (graph.value_info, infos)):
        del field[:]
        field.extend(items)
