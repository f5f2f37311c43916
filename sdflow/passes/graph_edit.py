"""Graph editing for passes: producers and readers of values, and weights that may be stubs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.onnx_model.files import read_values
from sdflow.onnx_model.nodes import prune, refill
from sdflow.onnx_model.stub import is_stub
from sdflow.weights.stubs import make_stub, stub_recipe


class GraphEdit:
    """An ONNX graph under edit. Nodes are changed in place; `clean` removes what is no longer read.

    folder: directory of the model's external data.
    """

    def __init__(self, graph: Any, folder: Path) -> None:
        self.graph = graph
        self.folder = folder
        self.weights: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the producer and reader indexes."""
        self.producers: dict[str, Any] = {name: node for node in self.graph.node for name in node.output if name}
        self.readers: Mapping[str, list[Any]] = defaultdict(list)
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                if name:
                    self.readers[name].append(node)
        self.results = {item.name for item in self.graph.output}

    def only_reader(self, name: str) -> Any | None:
        """Return the only node that reads a value, or None if several do or the value is a graph output."""
        readers = self.readers[name]
        return readers[0] if len(readers) == 1 and name not in self.results else None

    def insert_before(self, node: Any, nodes: Sequence[Any]) -> None:
        """Insert nodes before `node`, in order."""
        index = next(index for index, other in enumerate(self.graph.node) if other is node)
        for offset, new in enumerate(nodes):
            self.graph.node.insert(index + offset, new)
        self.refresh()

    def replace_nodes(self, changed: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """Replace each node with the given nodes (none: remove it). Faster than replacing one at a time."""
        by_output = {node.output[0]: [*new] for node, new in changed}
        refill(self.graph.node, (new for node in self.graph.node for new in by_output.get(node.output[0], (node,))))
        self.refresh()

    def sum_of(self, names: Sequence[str]) -> str:
        """Return the name of an initializer that holds the sum of others, all of one shape and type; a single one is
        returned.

        The sum is computed in float32 and rounded to their type. Stubs use recipes, which give the same bytes.
        """
        import onnx

        from sdflow.weights.evaluate import add_up
        from sdflow.weights.recipe import Sum

        if len(names) == 1:
            return names[0]
        name = "+".join(names)
        if name not in self.weights:
            parts = [self.weights[part] for part in names]
            tensor = onnx.TensorProto(name=name)
            if any(map(is_stub, parts)):
                make_stub(tensor, Sum(tuple(map(self._recipe, parts))))
            else:
                tensor = onnx.numpy_helper.from_array(add_up([read_values(part, self.folder) for part in parts]), name)
            self.graph.initializer.append(tensor)
            self.weights[name] = tensor
        return name

    def moved(
        self, name: str, result: str, move: Callable[[Any], Any], of_recipe: Callable[[Any], Any] | None = None
    ) -> str:
        """Return the name of initializer `result`, which holds `name`'s values moved to other places; created once.

        move: maps an array to an array. of_recipe: does the same to a recipe; without it, `move` is applied to a symbol
        (`sdflow.weights.symbol`). Both give the same bytes.
        """
        import numpy as np
        import onnx

        from sdflow.weights.symbol import Symbol, recipe_of

        if result not in self.weights:
            tensor, old = onnx.TensorProto(name=result), self.weights[name]
            if is_stub(old):
                recipe = stub_recipe(old)
                make_stub(tensor, of_recipe(recipe) if of_recipe else recipe_of(move(Symbol(recipe, []))))
            else:
                tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(move(read_values(old, self.folder))), result)
            self.graph.initializer.append(tensor)
            self.weights[result] = tensor
        return result

    def rotated(self, name: str, axis: int, size: int) -> str:
        """Return the name of an initializer: a weight before 16-bit rounding, times a Hadamard matrix along `axis`;
        created once."""
        import numpy as np

        from sdflow.weights.hadamard import rotated
        from sdflow.weights.recipe import Rotated, unrounded

        return self.moved(
            name,
            f"{name}/rotated",
            lambda values: rotated(values.astype(np.float32), axis, size),
            lambda recipe: Rotated(axis, size, unrounded(recipe)),
        )

    def quantized(self, name: str, kind: str, axis: int) -> tuple[str, str]:
        """Return the names of a weight's quantized values and of their scales; created once.

        kind: key of `sdflow.weights.quantized.KINDS`. axis: output channels. If a recipe rounds the weight to 16 bits,
        the unrounded weight is quantized.
        """
        from sdflow.weights.quantized import KINDS
        from sdflow.weights.recipe import Quantized, Scales

        def quantize(values: Any) -> Sequence[Any]:
            scales = KINDS[kind].scales(values, axis)
            return KINDS[kind].quantize(values, scales, axis), scales

        names = f"{name}/{kind}", f"{name}/{kind}/scales"
        self._quantize(name, names, quantize, lambda exact: (Quantized(kind, axis, exact), Scales(kind, axis, exact)))
        return names

    def blockwise(self, name: str, how: Any) -> tuple[str, str, str]:
        """Return the names of a weight (N, K) quantized in blocks, its scales, and its zero points; created once.

        how: a `sdflow.weights.blockwise.Format` whose block size divides K. If a recipe rounds the weight to 16 bits,
        the unrounded weight is quantized.
        """
        from sdflow.weights.blockwise import PARTS, quantize
        from sdflow.weights.recipe import Blockwise

        values = f"{name}/int{how.bits}"
        names = values, f"{values}/scales", f"{values}/zeros"

        def recipes(exact: Any) -> Sequence[Any]:
            return [Blockwise(part, how, exact) for part in PARTS]

        self._quantize(name, names, lambda exact: quantize(exact, how), recipes)
        return names

    def _quantize(
        self,
        name: str,
        results: Sequence[str],
        quantize: Callable[[Any], Iterable[Any]],
        recipes: Callable[[Any], Iterable[Any]],
    ) -> None:
        """Add initializers made of a weight before 16-bit rounding, once: of its values in float32, or of its recipe."""
        import numpy as np
        import onnx

        from sdflow.weights.recipe import unrounded

        if results[0] in self.weights:
            return
        old, made = self.weights[name], [onnx.TensorProto(name=result) for result in results]
        if is_stub(old):
            for tensor, recipe in zip(made, recipes(unrounded(stub_recipe(old))), strict=True):
                make_stub(tensor, recipe)
        else:
            found = quantize(read_values(old, self.folder).astype(np.float32))
            for tensor, array in zip(made, found, strict=True):
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
        self.weights |= {tensor.name: tensor for tensor in made}
        self.graph.initializer.extend(made)

    def _recipe(self, tensor: Any) -> Any:
        from sdflow.weights.symbol import recipe_of

        return stub_recipe(tensor) if is_stub(tensor) else recipe_of(read_values(tensor, self.folder))

    def constant(self, name: str, values: Any) -> str:
        """Return the name of an initializer with the array `values`; created once."""
        import onnx

        if name not in self.weights:
            self.weights[name] = onnx.numpy_helper.from_array(values, name)
            self.graph.initializer.append(self.weights[name])
        return name

    def clean(self) -> None:
        """Remove unread nodes, initializers and value infos, and sort the nodes topologically."""
        prune(self.graph)
        self.weights = {tensor.name: tensor for tensor in self.graph.initializer}
        self.refresh()
