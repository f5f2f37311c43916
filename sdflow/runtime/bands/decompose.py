"""Cut a graph into stages, each of which runs band by band, for a result that is that of the whole image.

A node that needs a value of the whole image - a normalization its statistics, attention all keys and values - begins
another stage. Values that a later stage reads are stored whole between stages. Within a stage, all operators are local
(`sdflow.runtime.bands.locality`): a band is read with a margin of rows on both sides, and the rows that the margin makes wrong
are discarded.

    x -> GroupNorm -> Conv -> GroupNorm -> Conv         stage 1: x, its statistics
                                                        stage 2: (x * scale + shift) -> Conv, its statistics
                                                        stage 3: (... * scale + shift) -> Conv
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from sdflow.errors import PassError
from sdflow.onnx_model.nodes import copied
from sdflow.runtime.bands.locality import MOVES, Locality
from sdflow.runtime.bands.norms import Norm, Shape, separate_norms, shape_of, types_of
from sdflow.runtime.sessions.specialize import specialize


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
    its results, stored. measured: sources of norms among its outputs. drops: stored values that no later stage reads.
    size: its values that exist at the same time, in bytes.
    """

    model: Any
    rows: int
    margin: int
    banded: tuple[Stored, ...]
    whole: Mapping[str, Stored]
    norms: tuple[Norm, ...]
    outputs: tuple[Stored, ...]
    measured: tuple[Norm, ...]
    drops: tuple[str, ...]
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
    """The stages of a graph, in order. rows: of the latents. input, output: of the graph. stored: most bytes that are
    stored at the same time; size: most of a stage."""

    stages: tuple[Stage, ...]
    rows: int
    input: str
    output: str
    stored: int
    size: int


def decompose(model: Any, sizes: Callable[[int], Mapping[str, int]], rows: int, band: int) -> Decomposition:
    """Cut a VAE half's ModelProto.

    sizes: rows of the latents -> axis name -> size, as for `specialize`, for one image. rows: of the latents. band: most
    rows of the latents in a band, fewer than `rows`; stages that then take no more memory than others run whole.
    Raises PassError if an operator is not known to be local, or a band is too small for its margins.
    """
    return _Cut(model, sizes, rows, band).decomposition()


class _Cut:
    def __init__(self, model: Any, sizes: Callable[[int], Mapping[str, int]], rows: int, band: int) -> None:
        self.rows, self.band = rows, band
        self.models = {count: specialize(model, sizes(count)) for count in (band, rows)}
        found = {count: separate_norms(each) for count, each in self.models.items()}
        self.norms = found[rows]
        self.types = {count: types_of(each.graph) for count, each in self.models.items()}
        self.nodes = list(self.models[rows].graph.node)
        if found[band] != found[rows] or [_key(each) for each in self.models[band].graph.node] != list(
            map(_key, self.nodes)
        ):
            raise PassError("the graph differs between sizes", where="bands")
        self.inputs = [item.name for item in model.graph.input]
        self.results = [item.name for item in model.graph.output]
        self.locality = self._locality()
        self.makers = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self.stage_of: dict[str, int] = dict.fromkeys(self.inputs, 0)
        self.wholes: set[str] = set()
        self._assign()

    def _locality(self) -> Locality:
        import onnx

        shapes = [{name: shape_of(kind) for name, kind in self.types[count].items()} for count in (self.band, self.rows)]
        constants = {
            tensor.name: onnx.numpy_helper.to_array(tensor).tolist()
            for tensor in self.models[self.rows].graph.initializer
            if tensor.data_type == onnx.TensorProto.INT64 and tensor.data_location != onnx.TensorProto.EXTERNAL
        }
        return Locality(shapes[0], shapes[1], constants, self.band, self.rows)

    def _assign(self) -> None:
        """Find the first stage that can compute each value."""
        of_norms = {name: norm for norm in self.norms for name in norm.inputs}
        for name in self.inputs:
            self.locality.start(name)
        for node in self.nodes:
            self.locality.add(node)
            whole = self.locality.whole_inputs(node)
            self.wholes.update(whole)
            stages = [self.stage_of[name] + (name in whole) for name in node.input if name in self.stage_of]
            stages += [self.stage_of[of_norms[name].source] + 1 for name in node.input if name in of_norms]
            self.stage_of.update(dict.fromkeys(filter(None, node.output), max(stages, default=0)))

    def decomposition(self) -> Decomposition:
        last = max(self.stage_of[name] for name in self.results)
        needs = [self._needs(stage) for stage in range(last + 1)]
        stored = {name: self._stored(name) for names, _ in needs for name in names}
        stored |= {name: self._stored(name) for name in self.results}
        sources = {norm.source for norm in self.norms}
        made = [
            [
                *(name for name in stored if self.stage_of[name] == stage and name not in self.inputs),
                *sorted(name for name in sources - stored.keys() if self.stage_of[name] == stage),
            ]
            for stage in range(last + 1)
        ]
        uses = {name: max(stage for stage, (names, _) in enumerate(needs) if name in names) for name in stored if name not in self.results}  # fmt: skip
        banded = [self._stage(stage, self.band, needs[stage], made[stage], stored, uses) for stage in range(last + 1)]
        most = max(stage.size for stage in banded)
        stages = []
        for place, stage in enumerate(banded):
            at_once = self._stage(place, self.rows, needs[place], made[place], stored, uses)
            stages.append(at_once if at_once.size <= most else stage)
        for stage in stages:
            if stage.rows < self.rows and stage.rows <= 2 * stage.margin:
                raise PassError(f"bands of {self.band} rows are within their margins of {stage.margin}", where="bands")
        held = [sum(stored[name].size for name in stored if self._is_held(name, stage, uses, last)) for stage in range(last + 1)]  # fmt: skip
        return Decomposition(tuple(stages), self.rows, self.inputs[0], self.results[0], max(held), most)

    def _is_held(self, name: str, stage: int, uses: Mapping[str, int], last: int) -> bool:
        return self.stage_of[name] <= stage <= uses.get(name, last)

    def _needs(self, stage: int) -> tuple[dict[str, None], list[int]]:
        """Return the values of earlier stages that a stage reads, and its nodes: those of the stage, and before them
        those without rows and those that only move values."""
        waiting = [place for place, node in enumerate(self.nodes) if self._is_made_in(node, stage)]
        values: dict[str, None] = {}
        places = set(waiting)
        while waiting:
            for name in self.nodes[waiting.pop()].input:
                if name not in self.makers:
                    values |= {name: None} if name in self.inputs else {}
                elif self._is_repeated(name):
                    waiting += {self.makers[name]} - places
                    places.add(self.makers[name])
                elif self.stage_of[name] < stage or name in self.wholes:
                    values[name] = None
        return values, sorted(places)

    def _is_made_in(self, node: Any, stage: int) -> bool:
        made = [name for name in node.output if name in self.locality.rows and self.stage_of[name] == stage]
        return any(not self._moves(name) for name in made)

    def _moves(self, name: str) -> bool:
        kept = {norm.source for norm in self.norms} | self.wholes | {*self.results}
        node = self.nodes[self.makers[name]]
        return name not in kept and (node.op_type in MOVES or self._widens(node))

    def _widens(self, node: Any) -> bool:
        if node.op_type != "Cast" or node.input[0] not in self.types[self.rows]:
            return False
        before, after = (self.types[self.rows][name].tensor_type.elem_type for name in (node.input[0], node.output[0]))
        return _bytes(before) <= _bytes(after)

    def _is_repeated(self, name: str) -> bool:
        return name not in self.locality.rows or self._moves(name)

    def _stored(self, name: str) -> Stored:
        import onnx

        kind = self.types[self.rows][name]
        dtype = "bfloat16" if kind.tensor_type.elem_type == onnx.TensorProto.BFLOAT16 else str(onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))  # fmt: skip
        scale = self.locality.scale(name)
        if scale is None:
            raise PassError(f"the rows of {name} are no multiple of the latents'", where="bands")
        return Stored(name, shape_of(kind), dtype, self.locality.rows[name].axis, scale)

    def _stage(
        self,
        stage: int,
        rows: int,
        needs: tuple[Mapping[str, None], Sequence[int]],
        outputs: Sequence[str],
        stored: Mapping[str, Stored],
        uses: Mapping[str, int],
    ) -> Stage:
        values, places = needs
        nodes = [copied(self.models[rows].graph.node[place]) for place in places]
        whole = self._read_whole(nodes, values)
        read = {name for node in nodes for name in node.input}
        banded = tuple(stored[name] for name in values if name in read)
        norms = tuple(norm for norm in self.norms if norm.scale in read)
        names = [*(each.name for each in banded), *(name for norm in norms for name in norm.inputs)]
        model = self._model(rows, nodes, names, {name: value for name, value in whole.items()}, outputs)
        given = {name: stored.get(name) or self._stored(name) for name in outputs}
        margin = max(ceil(self._wrong(name, places) / given[name].scale) for name in outputs)
        drops = tuple(name for name, use in uses.items() if use == stage)
        measured = tuple(norm for norm in self.norms if norm.source in outputs)
        return Stage(
            model, rows, margin, banded, {name: stored[value] for name, value in whole.items()}, norms,
            tuple(given.values()), measured, drops, _size(model.graph),
        )  # fmt: skip

    def _read_whole(self, nodes: Sequence[Any], values: Mapping[str, None]) -> dict[str, str]:
        """Let nodes read whole values by names of their own; return these, with the values."""
        found = {}
        for node in nodes:
            for place, name in enumerate(node.input):
                if name in self.locality.whole_inputs(node):
                    node.input[place] = f"{name}/whole"
                    found[f"{name}/whole"] = name
        return found

    def _wrong(self, name: str, places: Sequence[int]) -> int:
        """Return how many rows of a value its stage makes wrong at an end of a band."""
        shapes = [{key: shape_of(kind) for key, kind in self.types[count].items()} for count in (self.band, self.rows)]
        local = Locality(shapes[0], shapes[1], self.locality._constants, self.band, self.rows)
        made = {output for place in places for output in self.nodes[place].output}
        for place in places:
            for value in self.nodes[place].input:
                if value in self.locality.rows and value not in made:
                    local.rows[value] = type(self.locality.rows[value])(self.locality.rows[value].axis)
            local.add(self.nodes[place])
        return local.rows[name].wrong

    def _model(
        self, rows: int, nodes: Sequence[Any], inputs: Iterable[str], whole: Mapping[str, str], outputs: Sequence[str]
    ) -> Any:
        import onnx

        source, types = self.models[rows], self.types[rows]
        model = onnx.ModelProto(ir_version=source.ir_version)
        model.opset_import.extend(source.opset_import)
        graph = model.graph
        graph.name = "stage"
        graph.node.extend(nodes)
        read = {name for node in nodes for name in node.input}
        graph.initializer.extend(copied(tensor) for tensor in source.graph.initializer if tensor.name in read)
        for name in inputs:
            graph.input.add(name=name).type.CopyFrom(types[name])
        for name, value in whole.items():
            graph.input.add(name=name).type.CopyFrom(self.types[self.rows][value])
        for name in outputs:
            graph.output.add(name=name).type.CopyFrom(types[name])
        return specialize(model, {})


def _key(node: Any) -> tuple[Any, ...]:
    return node.op_type, *node.output


def _bytes(element: int) -> int:
    import onnx

    return 2 if element in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) else 4


def _size(graph: Any) -> int:
    """Return the most bytes of a graph's values that exist at the same time, if each is freed after its last use. Inputs
    and outputs exist all the time."""
    sizes = {}
    for name, kind in types_of(graph).items():
        sizes[name] = prod(shape_of(kind)) * _bytes(kind.tensor_type.elem_type)
    bound = {item.name for item in (*graph.input, *graph.output)}
    uses = {name: place for place, node in enumerate(graph.node) for name in node.input if name in sizes}
    now = most = sum(sizes[name] for name in bound)
    for place, node in enumerate(graph.node):
        now += sum(sizes[name] for name in node.output if name and name not in bound)
        most = max(most, now)
        now -= sum(sizes[name] for name in {*node.input, *node.output} if name in sizes and name not in bound and uses.get(name, place) == place)  # fmt: skip
    return most
