"""Run a graph whose weights exceed memory, in consecutive sessions.

The nodes, in order, are cut between blocks, where few values cross. Each piece is a session over its own weights, open
while all cases run through it; values that later pieces read are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sdflow.errors import VerificationError
from sdflow.verify.lowering.lower import Lowered, in_order
from sdflow.verify.lowering.session import FEW, float32_bytes, session_of

if TYPE_CHECKING:
    import onnxruntime

Given = Mapping[str, "np.ndarray"]

READERS = 2
"""Threads that compute values of initializers."""
OPEN = 2
"""Sessions in memory, of which one runs while the next is made: one thread converts and packs a piece's weights, which
takes longer than running it. Their weights together are within the limit of the session."""


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes of a graph as a model.

    inputs: values read from the graph's inputs and earlier pieces. outputs: values read later. weights: names of their
    initializers.
    """

    model: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: frozenset[str]


def cut(model: Any, types: Mapping[str, int], most: int) -> list[Piece]:
    """Cut a graph into pieces, in execution order.

    types: element types of the values that may pass between pieces. most: bytes of weights per piece, as float32;
    exceeded only by a piece that cannot be cut.
    """
    nodes, tensors = in_order(model.graph.node), {tensor.name: tensor for tensor in model.graph.initializer}
    results = [item.name for item in model.graph.output]
    last = {name: index for index, node in enumerate(nodes) for name in node.input} | dict.fromkeys(results, len(nodes))
    crossing = _crossing(nodes, last, types)
    pieces, begin = [], 0
    while begin < len(nodes):
        end = _end(nodes, tensors, begin, most, crossing)
        pieces.append(_piece(model, nodes[begin:end], tensors, types, last, end))
        begin = end
    return pieces


def _crossing(nodes: Sequence[Any], last: Mapping[str, int], types: Mapping[str, int]) -> list[int | None]:
    """The number of values that cross each place between nodes; None where one has no type, so that no cut is possible.
    Place i is before node i."""
    passing, unknown = [0] * (len(nodes) + 2), [0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        for name in node.output:
            if name and (end := last.get(name, index)) > index:
                for counts in (passing, unknown) if name not in types else (passing,):
                    counts[index + 1] += 1
                    counts[end + 1] -= 1
    places = zip(accumulate(passing), accumulate(unknown), strict=True)
    return [None if some else count for count, some in places][:-1]


def _end(
    nodes: Sequence[Any], tensors: Mapping[str, Any], begin: int, most: int, crossing: Sequence[int | None]
) -> int:
    """The end of the piece that begins here: the place with the fewest crossing values in the second half of what fits,
    else the last place that fits, else the first possible one."""
    weights: set[str] = set()
    held, best, later = 0, None, None
    for index in range(begin, len(nodes)):
        new = {name for name in nodes[index].input if name in tensors} - weights
        weights |= new
        held += float32_bytes(tensors[name] for name in new)
        if held > most and (best is not None or later is not None):
            return best[1] if best is not None else later or len(nodes)
        place, count = index + 1, crossing[index + 1]
        if count is not None and index + 1 < len(nodes):
            if held > most:
                return place
            later = place
            if 2 * held >= most and (best is None or count <= best[0]):
                best = count, place
    return len(nodes)


def _piece(
    model: Any,
    nodes: Sequence[Any],
    tensors: Mapping[str, Any],
    types: Mapping[str, int],
    last: Mapping[str, int],
    end: int,
) -> Piece:
    import onnx

    made = {name for node in nodes for name in node.output if name}
    read = dict.fromkeys(name for node in nodes for name in node.input if name and name not in made)
    given = {item.name: item for item in model.graph.input}
    inputs = [name for name in read if name not in tensors]
    outputs = [name for node in nodes for name in node.output if name and last.get(name, -1) >= end]
    results = {item.name: item for item in model.graph.output}
    weights = [name for name in read if name in tensors]
    if unknown := [name for name in inputs if name not in given and name not in types]:
        raise VerificationError(f"the graph has no type for {unknown[0]!r}, which a later piece reads")

    def info(name: str) -> Any:
        known = given.get(name) or results.get(name)
        return known or onnx.helper.make_tensor_value_info(name, types[name], None)

    part = onnx.ModelProto(ir_version=model.ir_version)
    part.opset_import.extend(model.opset_import)
    part.graph.name = model.graph.name
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(tensors[name] for name in weights)
    part.graph.input.extend(info(name) for name in inputs)
    part.graph.output.extend(info(name) for name in outputs)
    return Piece(part, tuple(inputs), tuple(outputs), frozenset(weights))


@dataclass(frozen=True)
class PortOfPieces:
    """An input or output, with the attributes of `onnxruntime.NodeArg`."""

    name: str
    type: str
    shape: Sequence[int | str | None]


@dataclass
class PieceSession:
    """A graph in pieces with the interface of a session. most: bytes of the weights of all pieces that are open at the
    same time, as float32; exceeded only by a piece that cannot be cut. exact: values of initializers supplied with the
    sessions, each computed when its piece is opened."""

    lowered: Lowered
    folder: Path
    most: int
    threads: int = 0
    fuse: bool = False
    exact: Given = field(default_factory=dict)
    pieces: list[Piece] = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = cut(self.lowered.model, self.lowered.types, self.most // OPEN)

    def get_inputs(self) -> list[PortOfPieces]:
        return [_described(item) for item in self.lowered.model.graph.input]

    def get_outputs(self) -> list[PortOfPieces]:
        return [_described(item) for item in self.lowered.model.graph.output]

    def run(self, names: Sequence[str] | None, feeds: Given) -> list[np.ndarray]:
        """The named outputs, or all, of one case."""
        (found,) = self.run_each([feeds], names)
        return found

    def run_each(self, cases: Sequence[Given], names: Sequence[str] | None = None) -> list[list[np.ndarray]]:
        """`run` for every case. Each piece is opened once, and runs all of them."""
        results = list(names or [port.name for port in self.get_outputs()])
        kept: list[dict[str, np.ndarray]] = [{} for _ in cases]
        for found in self.through(cases):
            for values, more in zip(kept, found, strict=True):
                values.update({name: more[name].numpy() for name in more.keys() & {*results}})
        return [[values[name] for name in results] for values in kept]

    def through(self, cases: Sequence[Given]) -> Iterator[list[dict[str, onnxruntime.OrtValue]]]:
        """Yield each piece's outputs for every case, by name."""
        held = [{name: ort_value(value) for name, value in case.items()} for case in cases]
        open_piece = partial(self._session, brief=len(cases) <= FEW and not self.fuse)
        sizes = [float32_bytes(piece.model.graph.initializer) for piece in self.pieces]
        opening: deque[Future[onnxruntime.InferenceSession]] = deque()

        def open_from(index: int) -> None:
            """Begin to open this piece and, if it fits beside it, the next."""
            for place in range(index + len(opening), min(index + OPEN, len(self.pieces))):
                if place == index or sum(sizes[index : place + 1]) <= self.most:
                    opening.append(pool.submit(open_piece, self.pieces[place]))

        with ThreadPoolExecutor(OPEN) as pool:
            open_from(0)
            for index, piece in enumerate(self.pieces):
                session = opening.popleft().result()
                needed = {name for later in self.pieces[index + 1 :] for name in later.inputs}
                given = []
                for values in held:
                    found = session.run_with_ort_values([*piece.outputs], {name: values[name] for name in piece.inputs})
                    given.append(dict(zip(piece.outputs, found, strict=True)))
                    values.update(given[-1])
                    for name in values.keys() - needed:
                        del values[name]
                del session
                open_from(index + 1)
                yield given
                del given

    def _session(self, piece: Piece, *, brief: bool) -> onnxruntime.InferenceSession:
        import onnxruntime

        make = onnxruntime.OrtValue.ortvalue_from_numpy
        names = sorted(piece.weights & self.exact.keys())
        with ThreadPoolExecutor(READERS) as pool:
            given = dict(zip(names, pool.map(lambda name: make(self.exact[name]), names), strict=True))
        part = Lowered(piece.model, {}, {}, {})
        plain = bool(given)
        return session_of(
            part, self.folder, threads=self.threads, fuse=self.fuse, given=given, brief=brief, plain=plain
        )


def ort_value(value: np.ndarray) -> onnxruntime.OrtValue:
    """Return an OrtValue of an array; bfloat16, which ONNX Runtime does not take from numpy, by its bits."""
    import numpy as np
    import onnx
    import onnxruntime

    if value.dtype != "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy(value)
    kind = onnx.TensorProto.BFLOAT16
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(value.view(np.uint16), kind)


def _described(item: Any) -> PortOfPieces:
    import onnx

    element = onnx.TensorProto.DataType.Name(item.type.tensor_type.elem_type).lower()
    dims: Iterator[Any] = iter(item.type.tensor_type.shape.dim)
    shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]
    return PortOfPieces(item.name, f"tensor({element})", shape)
