"""Remove blocks from a transformer's graph: a block's inputs replace its outputs.

A block only adds to the token streams that pass through it, the image's and the text's. Its inputs and outputs are
found by following these sums: the operand from outside the block, and the block's last sum that depends on it. A
value's name tells its block; fusions keep the names of what they do not absorb.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sdflow.errors import UsageError
from sdflow.onnx_model.nodes import copied, prune


def without_blocks(model: Any, blocks: str, layers: Sequence[int], where: str) -> Any:
    """Return a copy of a denoiser's ModelProto that bypasses these blocks, without nodes that only they need.

    blocks: name of the module list. layers: indices in it. where: for messages.
    Raises UsageError if the graph lacks a block, or its sums are fused with something else.
    """
    made = copied(model)
    graph = made.graph
    present = re.compile(rf"/{re.escape(blocks)}\.(\d+)/")
    count = 1 + max((int(found[1]) for node in graph.node if (found := present.match(node.output[0]))), default=-1)
    replaced: dict[str, str] = {}
    for layer in layers:
        if layer >= count:
            raise UsageError(
                f"the denoiser has {count} blocks, so block {layer} cannot be skipped",
                where=where,
                remedy=f"Blocks are counted from 0: use 0 to {count - 1}." if count else "Disable it.",
            )
        ways = _ways(graph, f"/{blocks}.{layer}/")
        if not ways:
            raise UsageError(
                f"the inputs and outputs of denoiser block {layer} cannot be found in its graph",
                where=where,
                remedy="Disable it.",
            )
        replaced |= ways
    for node in graph.node:
        for place, name in enumerate(node.input):
            while name in replaced:
                name = replaced[name]
            node.input[place] = name
    prune(graph)
    return made


def _ways(graph: Any, block: str) -> dict[str, str]:
    """Return output -> input for each stream that a block adds to. block: prefix of its values' names."""
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
        return {}  # a sum is fused with a norm of this block or the next
    begins = {name: name for node in sums for name in map(origin, node.input) if comes_in(name)}
    for _ in sums:  # sums may be in any order
        for node in sums:
            for name in map(origin, node.input):
                if name in begins:
                    begins[node.output[0]] = begins[name]
    return {last: begins[last] for last in _ends(sums, begins, origin)}


def _ends(sums: Sequence[Any], begins: dict[str, str], origin: Any) -> list[str]:
    """Return the last sums of the streams: those that no other sum of the block reads."""
    read = {origin(name) for node in sums for name in node.input}
    return [name for name in begins if name != begins[name] and name not in read]
