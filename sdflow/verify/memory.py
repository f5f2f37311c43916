"""Estimate a verification's memory from the sizes of the weights, and choose what to verify block by block.

Counts the weights, as each stage holds them (`reference.reference`, `artifact.judge`), and the decoder's largest
activations. If that exceeds the available memory, the largest submodels are loaded a piece at a time
(`reference.streamed`, `lowering.pieces`), with the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.errors import VerificationError
from sdflow.families.shared.base import Family
from sdflow.models.working_memory import full_size_channels
from sdflow.onnx_model.facts import precision_of
from sdflow.onnx_model.files import decode_errors
from sdflow.onnx_model.quantized import quantized_graph
from sdflow.onnx_model.reading import load_graph
from sdflow.sources.load import parameter_shapes
from sdflow.units import spell_bytes
from sdflow.verify.lowering.session import LARGE
from sdflow.verify.reference.half import KEPT
from sdflow.verify.reference.selection import Selection

LIBRARIES = 8 * 10**8
"""Resident bytes of a process after importing torch, diffusers and ONNX Runtime."""
MAPS = 6
"""Feature maps of the decoder's widest level, at the image's size, that are in memory at once."""
READ = 4
"""Maximum copies of a piece while PyTorch runs: as read, in float32, in 16 bits, and those in float32 again."""
PIECES = 6
"""Number of pieces that fit into the available memory, besides the libraries."""
COPIES = 4
"""Maximum copies of a piece: exact, converted and packed weights in a session, besides the checkpoint's."""


@dataclass(frozen=True)
class Size:
    """A submodel's number of parameters, and the size of the largest one."""

    parameters: int
    largest: int

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Size:
        counts = [prod(shape) for shape in shapes] or [0]
        return cls(sum(counts), max(counts))


@dataclass(frozen=True)
class GraphSize:
    """An artifact's parameters, bytes of its weights, and memory with all of them in a session.

    quantized: the file's size says nothing, since a session holds the weights in float32.
    """

    size: Size
    file: int
    float16: bool
    quantized: bool = False

    @property
    def whole(self) -> int:
        """Bytes with all weights in a session. Low-bit weights exist with the exact ones, both in float32."""
        whole = self._by_file
        return max(whole, LIBRARIES + 2 * 4 * self.size.parameters) if self.quantized else whole

    @property
    def _by_file(self) -> int:
        """Up to LARGE there is a converted and a packed copy, and for float16 also the file, with which the exact
        weights are compared. Beyond, converting weights one by one fragments the memory by as much as the exact weights
        of the previous run."""
        if (2 * self.file if self.float16 else self.file) > LARGE:
            return LIBRARIES + (2 * self.file if self.float16 else self.file + self.file // 4)
        return LIBRARIES + (5 * self.file if self.float16 else 2 * self.file)


@dataclass(frozen=True)
class MemoryPlan:
    """How much memory a verification takes, and what runs block by block.

    needed: maximum bytes. streamed: submodel -> bytes of its weights, as float32, in memory at a time; others are
    loaded whole.
    """

    needed: int
    streamed: Mapping[str, int]

    def words(self) -> str:
        """The memory needed, and how it is used, in words."""
        needed = f"needs about {spell_bytes(self.needed)} of memory"
        return needed + "".join(
            f"; {name} block by block, {spell_bytes(each)} of its weights at a time"
            for name, each in self.streamed.items()
        )


def plan_memory(
    family: Family, sizes: Mapping[str, Size], graphs: Mapping[str, GraphSize], activations: int, available: int
) -> MemoryPlan:
    """Choose what to verify whole and what block by block, to fit into `available` bytes if possible.

    sizes: of the submodels that the reference loads; empty if it is cached. graphs: of the artifacts. activations:
    bytes of the decoder's.
    """
    largest = {name: graph.size for name, graph in graphs.items()} | dict(sizes)
    gains = [name for name, size in largest.items() if COPIES * size.largest < size.parameters]
    order = sorted(gains, key=lambda name: largest[name].parameters, reverse=True)
    streamed: dict[str, int] = {}
    while (needed := _needed(family, sizes, graphs, activations, streamed)) > available and order:
        name = order.pop(0)
        streamed[name] = max(4 * largest[name].largest, (available - LIBRARIES - activations) // PIECES)
    return MemoryPlan(needed, streamed)


def _needed(
    family: Family,
    sizes: Mapping[str, Size],
    graphs: Mapping[str, GraphSize],
    activations: int,
    streamed: Mapping[str, int],
) -> int:
    found = [LIBRARIES]
    nets = family.nets(sizes or graphs).values()
    # ControlNets stay in memory with the denoiser while the image is generated.
    for together in ((family.denoiser, *nets), *((name,) for name in graphs)):
        of = [name for name in together if name in graphs]
        whole = sum(graphs[name].whole for name in of if name not in streamed)
        found.append(whole + max((LIBRARIES + COPIES * streamed[name] for name in of if name in streamed), default=0))
    stages = [family.text, (family.denoiser, family.decoder, *nets)]
    stages += [(name,) for name in (*family.prompters(sizes), family.encoder, family.checker) if name is not None]
    known = dict(sizes)
    if family.references is not None and family.denoiser in graphs:
        # PyTorch's module runs with references even if the reference is cached.
        known.setdefault(family.denoiser, graphs[family.denoiser].size)
    for stage in stages:
        of = [name for name in stage if name in known]
        count = sum(known[name].parameters for name in of if name not in streamed)
        pieces = max((READ * streamed[name] for name in of if name in streamed), default=0)
        # With a denoiser in pieces, whole submodels are loaded in both precisions.
        both = 4 * count if family.denoiser in of and pieces else 0
        whole = max(4 * count, both + 2 * count + min(4 * count, KEPT))
        found.append(LIBRARIES + activations + whole + pieces)
    return max(found)


def activation_bytes(selection: Selection, scale: int, width: int) -> int:
    """Bytes of the decoder's activations at the largest images. scale: pixels per latent. width: channels of its widest
    level at full size."""
    shapes = [(1, selection.rows, selection.columns), *selection.vae_shapes]
    return MAPS * 4 * width * max(batch * rows * scale * columns * scale for batch, rows, columns in shapes)


def require_memory(
    family: Family,
    loads: Mapping[str, Mapping[str, Any]] | None,
    selection: Selection,
    folder: Path,
    submodels: Sequence[str],
    available: int,
    modules: Mapping[str, Mapping[str, Any]] | None = None,
) -> MemoryPlan:
    """The memory plan of a verification. loads: of the reference's submodels; None if it is cached.

    folder: the pipeline's. available: bytes. modules: loads of the artifacts' submodels, to count parameters, which a
    graph may have packed. Raises VerificationError if memory does not suffice even block by block.
    """
    sizes = {name: Size.of(parameter_shapes(name, load).values()) for name, load in (loads or {}).items()}
    true = {
        name: sizes[name] if name in sizes else Size.of(parameter_shapes(name, load).values())
        for name, load in (modules or {}).items()
        if name in submodels
    }
    graphs = {name: _graph_in(folder / name, true.get(name)) for name in submodels}
    activations = 0
    if loads is not None:
        configs = {name: load["config"] for name, load in loads.items()}
        widest = full_size_channels(configs[family.decoder])
        activations = activation_bytes(selection, family.latents(configs).scale, widest)
    plan = plan_memory(family, sizes, graphs, activations, available)
    if plan.needed > available:
        raise VerificationError(
            f"it {plan.words()}, but {spell_bytes(available)} are available",
            where=str(folder),
            remedy="Close other programs, verify submodel by submodel (--submodel), or use a machine with more memory.",
        )
    return plan


def _graph_in(folder: Path, true: Size | None) -> GraphSize:
    """true: the size of the original module, if known."""
    weights = folder / WEIGHTS_FILE
    unreadable: tuple[type[Exception], ...] = (OSError, ValueError, VerificationError, *decode_errors())
    try:
        model = load_graph(folder / MODEL_FILE)
        file = weights.stat().st_size if weights.is_file() else 0
    except unreadable:
        return GraphSize(Size(0, 0), 0, False)  # it will not be loaded either, and that will be said
    graph, low = model.graph, quantized_graph(model) is not None
    size = true or Size.of(tensor.dims for tensor in graph.initializer)
    return GraphSize(size, file, precision_of(graph) != "float32", low)
