"""Stages of a graph that run in bands, and the memory that each takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from sdflow.runtime.bands.norms import Norm, Shape, shape_of, types_of


@dataclass(frozen=True)
class Stored:
    """A value that is stored whole between stages. shape: of the whole value. dtype: numpy's name. axis: of the rows. scale: its
    rows per latent row."""

    name: str
    shape: Shape
    dtype: str
    axis: int
    scale: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * (2 if self.dtype.endswith("16") else 4)


@dataclass(frozen=True)
class Stage:
    """Nodes that run band by band.

    model: a ModelProto of fixed shapes, whose weights refer to the artifact's data file. rows: latent rows per band.
    margin: how many of them are discarded at each cut. banded: inputs that are read band by band. whole: input name -> value
    that is read whole. norms: normalizations whose scale and shift are inputs. outputs: results, which are stored. measured:
    normalizations whose statistics are computed from the outputs. size: peak bytes of its values, including what the
    statistics need.
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
        """Return (begin, first, end) in latent rows for each band: it is read from `begin` on, and `first` to `end` are
        kept. rows: of the whole image."""
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

    drops: for each stage, the stored values that no later stage reads. rows: latent rows of the image. input, output: names of
    the graph's. stored: peak bytes of stored values. size: peak bytes of a stage in bands.
    """

    stages: tuple[Stage, ...]
    drops: tuple[tuple[str, ...], ...]
    rows: int
    input: str
    output: str
    stored: int
    size: int


def element_bytes(element: int) -> int:
    """Return the bytes per value of an ONNX floating-point type."""
    import onnx

    return 2 if element in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) else 4


def graph_bytes(graph: Any) -> int:
    """Return the peak bytes of a graph's values if each is freed after its last use. Inputs and outputs are never freed."""
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
