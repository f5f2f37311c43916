"""Insert nodes into a graph that copy weights to the GPU while earlier nodes run.

The nodes that read streamed weights, their readers, are divided into segments in graph order. Segment i finds its weights in
buffer i modulo 2, at fixed addresses that are inputs of the graph. In front of each segment, a node StreamWeights
(sdflow/runtime/kernels/stream_weights.c) waits for the copies of this segment and queues those of the next one. Another one
at the beginning of the graph queues the copies of the first segment.

Edges enforce this order whatever order ONNX Runtime chooses: every reader of segment i depends on an output of its
StreamWeights, and the StreamWeights of segment i + 1 depends on every reader of segment i. Values pass through the node
without being copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdflow.errors import PassError
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.nodes import attribute, first_output, import_domain, in_order, refill
from sdflow.runtime.sessions.specialize import TYPED_BY

if TYPE_CHECKING:
    import onnx

STREAM = "StreamWeights"
MOST_THROUGH = 64
"""Maximum number of values that pass through one node, as in stream_weights.c."""

Sizes = Mapping[str, int]
"""Streamed initializer -> its bytes in a buffer."""


@dataclass(frozen=True)
class Placed:
    """A streamed weight's place in a buffer. name: of the graph input. weight: name of the initializer. buffer: 0 or 1.
    offset: in the buffer, in bytes."""

    name: str
    weight: str
    buffer: int
    offset: int


@dataclass(frozen=True)
class Copy:
    """A copy from an address on the host to one on the device; size in bytes."""

    source: int
    target: int
    size: int


@dataclass
class _Reader:
    """A node that reads streamed weights. bit: stands for it in sets of readers."""

    node: Any
    bit: int
    weights: list[tuple[int, str]]
    """(input index, initializer)."""


@dataclass
class _Segment:
    readers: list[_Reader] = field(default_factory=list)
    size: int = 0
    placed: list[Placed] = field(default_factory=list)

    @property
    def bits(self) -> int:
        return sum(each.bit for each in self.readers)


def with_streaming(
    model: onnx.ModelProto,
    sizes: Sizes,
    buffer: int,
    copies: Callable[[Sequence[Placed]], Iterable[Copy]],
    *,
    delay: int = 0,
) -> tuple[onnx.ModelProto, list[Placed]]:
    """Return a copy of a graph that takes its streamed weights as inputs, and their places in the two buffers.

    buffer: bytes of each. copies: returns the copies that fill a buffer with these weights. delay: on the CPU, microseconds
    before each copy. Raises PassError if a reader has only constant inputs, or one of unknown type.
    """
    from onnx import ModelProto, helper

    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    nodes = in_order(graph.node)
    segments = _segments(nodes, sizes, buffer)
    if not segments:
        return result, []
    constants = {tensor.name: tensor for tensor in graph.initializer}
    reach = _Reach(nodes, [each for segment in segments for each in segment.readers])
    types = _types(graph)
    placed = [each for segment in segments for each in segment.placed]
    changing = _changing(graph, nodes)
    streams = [_Stream(types, changing, [], {})]
    streams[0].route(next(node for node in nodes if not changing.isdisjoint(node.input)))
    for number, segment in enumerate(segments, 1):
        through, covered, seen = _Stream(types, changing, [], {}, number), 0, 0
        for reader in segment.readers:
            if not reach.before(reader) & seen:
                covered |= reach.of(through.route(reader.node))
            seen |= reader.bit
        after = [] if number == 1 else segments[number - 2].readers
        earlier = sum(each.bits for each in segments[: number - 1])
        for reader in reversed(after):
            if not covered & reader.bit:
                through.after.append(reach.later(first_output(reader.node), earlier))
                covered |= reach.of(through.after[-1])
        if number == 1:
            through.after.extend(streams[0].through.values())
        streams.append(through)
    for segment in segments:
        _read_inputs(graph, segment, constants)
    made = []
    for number, stream in enumerate(streams):
        following = copies(segments[number].placed) if number < len(segments) else ()
        made.append(stream.node(waits=number > 0, copies=list(following), delay=delay))
        graph.value_info.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in stream.outputs())
    refill(graph.node, in_order([*made, *nodes]))
    refill(graph.initializer, (tensor for tensor in graph.initializer if tensor.name not in sizes))
    import_domain(result, DOMAIN)
    return result, placed


def _segments(nodes: Sequence[Any], sizes: Sizes, buffer: int) -> list[_Segment]:
    """Divide the readers into segments whose weights fit into a buffer."""
    segments: list[_Segment] = []
    times: dict[str, int] = {}
    count = 0
    for node in nodes:
        weights = [(index, name) for index, name in enumerate(node.input) if name in sizes]
        if not weights:
            continue
        size = sum(sizes[name] for _, name in weights)
        assert size <= buffer, f"the weights of {node.name} do not fit into a buffer"
        if not segments or segments[-1].size + size > buffer:
            segments.append(_Segment())
        segment = segments[-1]
        segment.readers.append(_Reader(node, 1 << count, weights))
        count += 1
        for _, name in weights:
            again = times[name] = times.get(name, -1) + 1
            own = f"{name}/{again}" if again else name
            segment.placed.append(Placed(own, name, len(segments) % 2, segment.size))
            segment.size += sizes[name]
    return segments


class _Reach:
    """The readers that each value depends on, as bits."""

    def __init__(self, nodes: Sequence[Any], readers: Sequence[_Reader]) -> None:
        own = {id(reader.node): reader.bit for reader in readers}
        self._of: dict[str, int] = {}
        self._readers: dict[str, list[Any]] = {}
        for node in nodes:
            bits = own.get(id(node), 0)
            for name in node.input:
                bits |= self._of.get(name, 0)
                self._readers.setdefault(name, []).append(node)
            self._of.update(dict.fromkeys(node.output, bits))
        self._of.pop("", None)

    def of(self, value: str) -> int:
        """The readers that a value depends on."""
        return self._of.get(value, 0)

    def later(self, value: str, allowed: int) -> str:
        """Follow a value through nodes that are its only readers and depend on no streamed readers but `allowed`. ONNX Runtime
        fuses such a node, for example an addition, into the previous one only if nothing else reads the value."""
        while len(nodes := self._readers.get(value, [])) == 1:
            made = first_output(nodes[0])
            if self.of(made) & ~allowed:
                break
            value = made
        return value

    def before(self, reader: _Reader) -> int:
        """The readers that this reader depends on."""
        return self.of(first_output(reader.node)) & ~reader.bit


@dataclass
class _Stream:
    """A StreamWeights node under construction. changing: values that depend on the graph's inputs. after: values that it
    waits for. through: value -> its name after the node."""

    types: dict[str, int]
    changing: set[str]
    after: list[str]
    through: dict[str, str]
    number: int = 0

    def route(self, node: Any) -> str:
        """Make a node read one of its inputs through this one; return that input."""
        index, value = next(
            ((i, name) for i, name in enumerate(node.input) if name in self.through),
            next(((i, name) for i, name in enumerate(node.input) if name in self.changing), (-1, "")),
        )
        if value not in self.types or (value not in self.through and len(self.through) == MOST_THROUGH):
            raise PassError(
                f"the weights of {node.op_type} {node.name!r:.60} cannot be streamed: none of its inputs can be delayed",
                where="streaming",
                remedy="Allow more memory (--device-memory), or use --low-memory.",
            )
        node.input[index] = self.through.setdefault(value, f"{value}/stream/{self.number}")
        self.types[node.input[index]] = self.types[value]
        self.changing.add(node.input[index])
        return value

    def node(self, *, waits: bool, copies: Sequence[Copy], delay: int) -> Any:
        """Return the NodeProto."""
        from onnx import helper

        where = {
            name: value
            for i, each in enumerate(copies)
            for name, value in ((f"from{i}", each.source), (f"to{i}", each.target), (f"bytes{i}", each.size))
        }
        return helper.make_node(
            STREAM,
            [*self.through, *self.after],
            [*self.through.values()],
            f"/stream/{self.number}",
            domain=DOMAIN,
            through=len(self.through),
            waits=int(waits),
            count=len(copies),
            delay=delay,
            **where,
        )

    def outputs(self) -> list[tuple[str, int]]:
        """The names and element types of its outputs."""
        return [(name, self.types[value]) for value, name in self.through.items()]


def _read_inputs(graph: Any, segment: _Segment, constants: Mapping[str, Any]) -> None:
    """Make a segment's weights inputs of the graph."""
    from onnx import helper

    names = iter(segment.placed)
    for reader in segment.readers:
        for index, weight in reader.weights:
            tensor, own = constants[weight], next(names)
            reader.node.input[index] = own.name
            graph.input.append(helper.make_tensor_value_info(own.name, tensor.data_type, list(tensor.dims)))


def _changing(graph: Any, nodes: Sequence[Any]) -> set[str]:
    """Return the values that depend on the graph's inputs."""
    found = {item.name for item in graph.input}
    for node in nodes:
        if not found.isdisjoint(node.input):
            found.update(name for name in node.output if name)
    return found


def _types(graph: Any) -> dict[str, int]:
    """Return value -> element type, also where the graph does not say it: that of the input that gives it. ONNX Runtime
    refuses a wrong one."""
    from onnx import TensorProto

    types = {item.name: item.type.tensor_type.elem_type for item in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    found: int
    for node in in_order(graph.node):
        if node.domain == DOMAIN and node.op_type.startswith("Float8"):
            if "Product" not in node.op_type:
                continue
            types[node.input[0]] = TensorProto.UINT8  # rows, of one of several outputs
            found = TensorProto.BFLOAT16 if node.op_type.endswith("Bfloat16") else TensorProto.FLOAT16
        elif node.op_type == "Cast":
            found = attribute(node, "to", None)
        elif node.input:
            found = types.get(node.input[TYPED_BY.get(node.op_type, 0)], 0)
        else:
            continue
        if found:
            for name in node.output:
                types.setdefault(name, found)
    return types
