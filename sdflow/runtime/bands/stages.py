"""The stages that a graph is cut into, and the memory that each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from sdflow.runtime.bands.norms import Norm, Shape, shape_of, types_of


@dataclass(frozen=True)
class Stored:
    """A value that is stored whole. shape: of the whole. dtype: numpy's name. axis: of the rows. scale: number of its
    rows per row of the latents."""

    name: str
    shape: Shape
    dtype: str
    axis: int
    scale: int

    @property
    def size(self) -> int:
        """In bytes."""
        return prod(self.shape) * (2 if self.dtype.endswith("16") else 4)


@dataclass(frozen=True)
class Stage:
    """Nodes that run band by band.

    model: a ModelProto of fixed shapes, whose weights refer to the artifact's data file. rows: of the latents in a band.
    margin: of them, those at an end of a band where the image goes on, whose results are discarded. banded: its inputs
    by bands. whole: names of inputs -> values that it reads whole. norms: those whose parameters are inputs. outputs:
    its results, stored. measured: norms whose sources are among its outputs. size: its values that exist at the same time,
    in bytes, with what the statistics need.
    """

    model: Any
    rows: int
    margin: int
    banded: tuple[Stored, ...]
    whole: Mapping[str, Stored]
    norms: tuple[Norm, ...]
    outputs: tuple[Stored, ...]
    measured: tuple[Norm, ...]
    size: int

    def windows(self, rows: int) -> list[tuple[int, int, int]]:
        """Return (begin, first, end) of each band: rows of the latents; from `begin` on are read, of which `first` to
        `end` are kept. rows: of the whole."""
        if self.rows >= rows:
            return [(0, 0, rows)]
        found, done = [], 0
        while done < rows:
            begin = min(max(done - self.margin, 0), rows - self.rows)
            end = rows if begin + self.rows == rows else begin + self.rows - self.margin
            found.append((begin, done, end))
            done = end
        return found


@dataclass(frozen=True)
class Decomposition:
    """The stages of a graph, in order.

    drops: for each stage, the stored values that no later one reads. rows: of the latents. input, output: of the graph.
    stored: most bytes that are stored at the same time. size: most bytes of a stage that runs in bands.
    """

    stages: tuple[Stage, ...]
    drops: tuple[tuple[str, ...], ...]
    rows: int
    input: str
    output: str
    stored: int
    size: int


def element_bytes(element: int) -> int:
    """Return the bytes of a value of this floating type of ONNX."""
    import onnx

    return 2 if element in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) else 4


def graph_bytes(graph: Any) -> int:
    """Return the most bytes of a graph's values that exist at the same time, if each is freed after its last use. Inputs
    and outputs exist all the time."""
    sizes = {}
    for name, kind in types_of(graph).items():
        sizes[name] = prod(shape_of(kind)) * element_bytes(kind.tensor_type.elem_type)
    bound = {item.name for item in (*graph.input, *graph.output)}
    uses = {name: place for place, node in enumerate(graph.node) for name in node.input if name in sizes}
    now = most = sum(sizes[name] for name in bound)
    for place, node in enumerate(graph.node):
        now += sum(sizes[name] for name in node.output if name and name not in bound)
        most = max(most, now)
        ended = {name for name in (*node.input, *node.output) if name in sizes and uses.get(name, place) == place}
        now -= sum(sizes[name] for name in ended - bound)
    return most
