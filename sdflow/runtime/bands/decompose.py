"""Cut a graph into stages that each run band by band and together compute the same result as the whole graph.

Some nodes need the whole image: a normalization its statistics, attention all keys and values. Each of them begins a new
stage; values that later stages read are stored whole in between. Within a stage, all operators are local
(`sdflow.runtime.bands.locality`): a band is read with a margin of rows on both sides, and rows that come out wrong because
the image was cut there are discarded.

    x -> GroupNorm -> Conv -> GroupNorm -> Conv         stage 1: x, its statistics
                                                        stage 2: (x * scale + shift) -> Conv, its statistics
                                                        stage 3: (... * scale + shift) -> Conv
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, prod
from typing import Any

from sdflow.errors import PassError
from sdflow.onnx_model.nodes import copied
from sdflow.runtime.bands.locality import MOVES, Locality, Rows
from sdflow.runtime.bands.norms import separate_norms, shape_of, types_of
from sdflow.runtime.bands.stages import Decomposition, Stage, Stored, element_bytes, graph_bytes
from sdflow.runtime.sessions.specialize import specialize

STATISTICS_BYTES = 8
"""Bytes per value that `Statistics` needs: it computes in float32, in two copies."""


def decompose(model: Any, sizes: Callable[[int], Mapping[str, int]], rows: int, band: int) -> Decomposition:
    """Cut a VAE half's ModelProto.

    sizes: maps the number of latent rows to axis sizes by name, as for `specialize`, for one image. rows: latent rows of
    the image. band: maximum latent rows per band, fewer than `rows`. A stage runs whole if that takes no more memory than
    the largest stage takes in bands.
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
        made = [[(node.op_type, *node.output) for node in each.graph.node] for each in self.models.values()]
        fixed = [_fixed_constants(each) for each in self.models.values()]
        if found[band] != found[rows] or made[0] != made[-1] or fixed[0] != fixed[-1]:
            raise PassError("the graph differs between image sizes", where="bands")
        self.inputs = [item.name for item in model.graph.input]
        self.results = [item.name for item in model.graph.output]
        self.shapes = {
            count: {name: shape_of(kind) for name, kind in types.items()} for count, types in self.types.items()
        }
        self.constants = self._constants()
        self.locality = self._locality()
        self.makers = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self.stage_of: dict[str, int] = dict.fromkeys(self.inputs, 0)
        self.wholes: set[str] = set()
        self._assign()

    def _constants(self) -> dict[str, Any]:
        import onnx

        return {
            tensor.name: onnx.numpy_helper.to_array(tensor).tolist()
            for tensor in self.models[self.rows].graph.initializer
            if tensor.data_type == onnx.TensorProto.INT64 and tensor.data_location != onnx.TensorProto.EXTERNAL
        }

    def _locality(self) -> Locality:
        return Locality(self.shapes[self.band], self.shapes[self.rows], self.constants, self.band, self.rows)

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
        made = [
            [name for name in stored if self.stage_of[name] == stage and name not in self.inputs]
            for stage in range(last + 1)
        ]
        if not all(made):
            raise PassError("all rows of its input are needed at once", where="bands")
        uses = {name: stage for stage, (names, _) in enumerate(needs) for name in names}
        parts = [
            [self._stage(rows, *needs[stage], made[stage], stored) for stage in range(last + 1)]
            for rows in (self.band, self.rows)
        ]
        most = max(stage.size for stage in parts[0])
        stages = [whole if whole.size <= most else banded for banded, whole in zip(*parts, strict=True)]
        for stage in stages:
            if stage.rows < self.rows and stage.rows <= 2 * stage.margin:
                raise PassError(f"bands of {self.band} rows are too small for margins of {stage.margin}", where="bands")
        drops = [tuple(name for name, use in uses.items() if use == stage) for stage in range(last + 1)]
        held = [
            sum(each.size for name, each in stored.items() if self.stage_of[name] <= stage <= uses.get(name, last))
            for stage in range(last + 1)
        ]
        return Decomposition(tuple(stages), tuple(drops), self.rows, self.inputs[0], self.results[0], max(held), most)

    def _needs(self, stage: int) -> tuple[dict[str, None], list[int]]:
        """Return the values of earlier stages that a stage reads, and its nodes, including repeated ones of earlier stages:
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
                elif self.stage_of[name] < stage:
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
        return element_bytes(before) <= element_bytes(after)

    def _is_repeated(self, name: str) -> bool:
        return name not in self.locality.rows or self._moves(name)

    def _stored(self, name: str) -> Stored:
        from onnx import TensorProto, helper

        element = self.types[self.rows][name].tensor_type.elem_type
        dtype = "bfloat16" if element == TensorProto.BFLOAT16 else str(helper.tensor_dtype_to_np_dtype(element))
        scale = self.locality.scale(name)
        if scale is None:
            raise PassError(f"the rows of {name} are not a multiple of the latents'", where="bands")
        return Stored(name, self.shapes[self.rows][name], dtype, self.locality.rows[name].axis, scale)

    def _stage(
        self,
        rows: int,
        values: Mapping[str, None],
        places: Sequence[int],
        outputs: Sequence[str],
        stored: Mapping[str, Stored],
    ) -> Stage:
        """Return a stage of these nodes. values: of earlier stages. rows: latent rows per band."""
        nodes = [copied(self.models[rows].graph.node[place]) for place in places]
        whole = self._read_whole(nodes)
        read = {name for node in nodes for name in node.input}
        norms = tuple(norm for norm in self.norms if norm.scale in read)
        inputs = [name for name in values if name in read]
        names = [*inputs, *(name for norm in norms for name in norm.inputs)]
        model = self._model(rows, nodes, names, whole, outputs)
        wrong = self._wrong(places)
        measured = tuple(norm for norm in self.norms if norm.source in outputs)
        measuring = max((STATISTICS_BYTES * prod(self.shapes[rows][norm.source]) for norm in measured), default=0)
        return Stage(
            model=model,
            rows=rows,
            margin=max(ceil(wrong[name] / stored[name].scale) for name in outputs),
            banded=tuple(stored[name] for name in inputs),
            whole={name: stored[value] for name, value in whole.items()},
            norms=norms,
            outputs=tuple(stored[name] for name in outputs),
            measured=measured,
            size=graph_bytes(model.graph) + measuring,
        )

    def _read_whole(self, nodes: Sequence[Any]) -> dict[str, str]:
        """Rename the inputs that nodes read whole; return new name -> value."""
        found = {}
        for node in nodes:
            for name in self.locality.whole_inputs(node):
                node.input[list(node.input).index(name, 1)] = f"{name}/whole"
                found[f"{name}/whole"] = name
        return found

    def _wrong(self, places: Sequence[int]) -> dict[str, int]:
        """Return how many rows of each value are wrong at a cut if only these nodes run in a band."""
        local = self._locality()
        for place in places:
            for name in self.nodes[place].input:
                if name in self.locality.rows and name not in local.rows:
                    local.rows[name] = Rows(self.locality.rows[name].axis)
            local.add(self.nodes[place])
        return {name: rows.wrong for name, rows in local.rows.items()}

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


def _fixed_constants(model: Any) -> dict[str, Any]:
    """Return the constants that may not depend on the image's size, by name: all but the values of integers, which are shapes
    and places. A grid of the rows' places, folded into a constant, would be the band's."""
    import onnx

    inner = [tensor for tensor in model.graph.initializer if tensor.data_location != onnx.TensorProto.EXTERNAL]
    whole = onnx.TensorProto.INT64
    return {each.name: tuple(each.dims) if each.data_type == whole else each.SerializeToString() for each in inner}
