"""Choose which weights of a model stay on the GPU and which are streamed to it in every run.

A streamed weight waits in host memory. It is copied into one of two buffers on the GPU while nodes that do not need it yet
run (`sdflow.runtime.sessions.streamed_graph`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sdflow.onnx_model.files import is_external
from sdflow.onnx_model.float8 import FLOAT8_MATMUL
from sdflow.onnx_model.nodes import in_order
from sdflow.runtime.sessions.spans import Span, aligned, span_of

if TYPE_CHECKING:
    import onnx
    import torch

PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", FLOAT8_MATMUL)
"""Operators whose weights can be streamed, because every run reads them from their input. Convolutions do not: they keep a
copy in another layout."""
LEAST = 1 << 20
"""Weights with fewer bytes always stay."""
SEGMENT = 1 << 27
"""Bytes that are copied at once; more if the largest weight is larger."""


class StreamBuffers:
    """Two buffers on a device, shared by models whose runs do not overlap. size: bytes of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._pair: tuple[torch.Tensor, ...] | None = None

    def on(self, device: str) -> tuple[torch.Tensor, ...]:
        """Return both as uint8 tensors, created on first use."""
        import torch

        with self._lock:
            pair = self._pair
            if pair is None:
                memory = torch.empty(2 * self.size, dtype=torch.uint8, device=device)
                pair = self._pair = (memory[: self.size], memory[self.size :])
            return pair


@dataclass(frozen=True)
class StreamPlan:
    """A choice of weights to stream. streamed: these weights, in reading order. resident: bytes of the others, which stay on
    the device. per_run: bytes copied per run of the part that reads the latents, or of the whole model if it has no latents.
    buffers: those that the streamed weights are copied to."""

    streamed: tuple[Span, ...]
    resident: int
    per_run: int
    buffers: StreamBuffers = field(compare=False)

    @property
    def size(self) -> int:
        """Bytes of the streamed weights."""
        return sum(length for _, _, length in self.streamed)


def buffer_size(graph: onnx.ModelProto, *, least: int = LEAST, segment: int = SEGMENT) -> int:
    """Return the buffer size that suffices for any choice of streamed weights of a graph; 0 if none can be streamed."""
    sizes: Counter[str] = Counter()
    for each in _streamable(graph, None, least):
        sizes[each.reader] += each.size
    return max(max(sizes.values(), default=0), min(segment, sizes.total()))


@dataclass(frozen=True)
class _Weight:
    span: Span
    size: int
    once: bool
    reader: str


def stream_plan(
    graph: onnx.ModelProto, room: int, buffers: StreamBuffers, latents: str | None = None, *, least: int = LEAST
) -> StreamPlan | None:
    """Return the plan that keeps as many weights as fit into `room` bytes; None if the model does not fit even when streamed.

    latents: the input that changes from step to step. Weights whose readers do not depend on it are read once per image,
    so they are streamed first; then as few of the others as possible, evenly spread over the model to give every copy the
    same time. None: each run reads all weights once, as in a text encoder, so all are streamed. least: weights with fewer
    bytes stay.
    """
    spans = {span_of(tensor) for tensor in graph.graph.initializer if is_external(tensor)}
    total = sum(aligned(length) for _, _, length in spans)
    found = _streamable(graph, latents, least)
    chosen = [each for each in found if each.once]
    excess = total - room - sum(each.size for each in chosen)
    chosen += _spread([each for each in found if not each.once], excess)
    resident = total - sum(each.size for each in chosen)
    if resident > room or not chosen:
        return None
    taken = {each.span for each in chosen}
    again = sum(each.size for each in chosen if latents is None or not each.once)
    return StreamPlan(tuple(each.span for each in found if each.span in taken), resident, again, buffers)


def _streamable(graph: onnx.ModelProto, latents: str | None, least: int) -> list[_Weight]:
    """Return the weights that may be streamed, in order. once: their reader does not depend on the latents.
    reader: its first output."""
    weights = {tensor.name: span_of(tensor) for tensor in graph.graph.initializer if is_external(tensor)}
    constant = {tensor.name for tensor in graph.graph.initializer}
    readers = Counter(name for node in graph.graph.node for name in node.input)
    readers.update(item.name for item in graph.graph.output)
    used = Counter(weights.values())
    changing = {latents}
    found = []
    for node in in_order(graph.graph.node):
        changes = not changing.isdisjoint(node.input)
        if changes:
            changing.update(name for name in node.output if name)
        if node.op_type not in PRODUCTS or all(name in constant for name in node.input):
            continue
        for name in node.input:
            span = weights.get(name)
            if span is not None and span[2] >= least and readers[name] == 1 and used[span] == 1:
                found.append(_Weight(span, aligned(span[2]), latents is None or not changes, node.output[0]))
    return found


def _spread(weights: Sequence[_Weight], wanted: int) -> list[_Weight]:
    """Return evenly spread weights of at least `wanted` bytes, or all of them."""
    total = sum(each.size for each in weights)
    share = min(wanted, total)
    while share > 0:
        chosen, owed = [], 0
        for each in weights:
            owed += each.size * share
            if owed >= each.size * total:
                chosen.append(each)
                owed -= each.size * total
        if share == total or sum(each.size for each in chosen) >= wanted:
            return chosen
        share = min(total, share + max(1, total // 200))
    return []


def is_half(graph: onnx.ModelProto) -> bool:
    """Whether most of a graph's weights have 16 bits or fewer."""
    from onnx import TensorProto

    wide = sum(
        span_of(each)[2]
        for each in graph.graph.initializer
        if is_external(each) and each.data_type == TensorProto.FLOAT
    )
    return 2 * wide <= sum(span_of(each)[2] for each in graph.graph.initializer if is_external(each))
