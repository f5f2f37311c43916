"""What passes that rewrite graphs need: who makes a value, who reads it, and weights that may be stubs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdflow.onnx_model.files import read_values
from sdflow.onnx_model.nodes import copied, in_order
from sdflow.onnx_model.stub import is_stub
from sdflow.weights.stubs import make_stub, stub_recipe


class GraphEdit:
    """A graph while it is rewritten. Nodes are changed in place; `clean` drops what nothing reads any more.

    folder: the directory of the model's external data.
    """

    def __init__(self, graph: Any, folder: Path) -> None:
        self.graph = graph
        self.folder = folder
        self.weights: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self.refresh()

    def refresh(self) -> None:
        """Look at the nodes again."""
        self.producers: dict[str, Any] = {name: node for node in self.graph.node for name in node.output if name}
        self.readers: Mapping[str, list[Any]] = defaultdict(list)
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                if name:
                    self.readers[name].append(node)
        self.results = {item.name for item in self.graph.output}

    def only_reader(self, name: str) -> Any | None:
        """The node that reads a value, if it is the only one and the value is no output of the graph."""
        readers = self.readers[name]
        return readers[0] if len(readers) == 1 and name not in self.results else None

    def insert_before(self, node: Any, nodes: Sequence[Any]) -> None:
        """Put nodes in front of `node`, in their order."""
        index = next(index for index, other in enumerate(self.graph.node) if other is node)
        for offset, new in enumerate(nodes):
            self.graph.node.insert(index + offset, new)
        self.refresh()

    def replace_nodes(self, changed: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        """Put nodes in the place of each of these, in their order; none to drop it. Quicker than one after the other."""
        by_output = {node.output[0]: [*new] for node, new in changed}
        nodes = [new for node in self.graph.node for new in by_output.get(node.output[0], (node,))]
        made = [copied(node) for node in nodes]
        del self.graph.node[:]
        self.graph.node.extend(made)
        self.refresh()

    def sum_of(self, names: Sequence[str]) -> str:
        """The name of an initializer that is the sum of others, of one shape and type; a single one is itself.

        Added up in float32, and rounded to their type: for stubs by their recipes, so that both give the same bytes.
        """
        import onnx

        from sdflow.weights.recipe import Sum, add_up

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
        """The name of an initializer, `result`, with the values of another in other places; made once.

        move: takes and gives an array. of_recipe: the same for a recipe; without it, `move` is applied to a symbol
        (`sdflow.weights.symbol`), so that both give the same bytes.
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
        """The name of an initializer: another, not rounded to 16 bits, times a Hadamard matrix along an axis; made once."""
        import numpy as np
        import onnx

        from sdflow.weights.hadamard import rotated
        from sdflow.weights.recipe import Rotated, unrounded

        result = f"{name}/rotated"
        if result not in self.weights:
            tensor, old = onnx.TensorProto(name=result), self.weights[name]
            if is_stub(old):
                make_stub(tensor, Rotated(axis, size, unrounded(stub_recipe(old))))
            else:
                values = read_values(old, self.folder).astype(np.float32)
                tensor.CopyFrom(onnx.numpy_helper.from_array(rotated(values, axis, size), result))
            self.graph.initializer.append(tensor)
            self.weights[result] = tensor
        return result

    def quantized(self, name: str, kind: str, axis: int) -> tuple[str, str]:
        """The names of two initializers: the values of a weight in few bits, and their scales; made once.

        kind: of `sdflow.weights.quantized.KINDS`. axis: of the output channels. A weight that a recipe rounds to float16 is
        quantized as it was before.
        """
        import numpy as np
        import onnx

        from sdflow.weights.quantized import KINDS
        from sdflow.weights.recipe import Quantized, Recipe, Scales, unrounded

        names = f"{name}/{kind}", f"{name}/{kind}/scales"
        if names[0] in self.weights:
            return names
        old = self.weights[name]
        if is_stub(old):
            exact = unrounded(stub_recipe(old))
            recipes: tuple[Recipe, ...] = (Quantized(kind, axis, exact), Scales(kind, axis, exact))
            for result, recipe in zip(names, recipes, strict=True):
                self.weights[result] = onnx.TensorProto(name=result)
                make_stub(self.weights[result], recipe)
        else:
            values = read_values(old, self.folder).astype(np.float32)
            scales = KINDS[kind].scales(values, axis)
            made_values = KINDS[kind].quantize(values, scales, axis), scales
            for result, array in zip(names, made_values, strict=True):
                self.weights[result] = onnx.numpy_helper.from_array(np.ascontiguousarray(array), result)
        self.graph.initializer.extend(self.weights[result] for result in names)
        return names

    def blockwise(self, name: str, how: Any) -> tuple[str, str, str]:
        """The names of three initializers: a weight (N, K) quantized by blocks, its scales, and its zeros; made once.

        how: a `sdflow.weights.blockwise.Format` whose size divides K. A weight that a recipe rounds to 16 bits is quantized as it
        was before.
        """
        import numpy as np
        import onnx

        from sdflow.weights.blockwise import PARTS, quantize
        from sdflow.weights.recipe import Blockwise, unrounded

        values, scales, zeros = (f"{name}/int{how.bits}", f"{name}/int{how.bits}/scales", f"{name}/int{how.bits}/zeros")
        if values in self.weights:
            return values, scales, zeros
        old, made = self.weights[name], [onnx.TensorProto(name=result) for result in (values, scales, zeros)]
        if is_stub(old):
            exact = unrounded(stub_recipe(old))
            for tensor, part in zip(made, PARTS, strict=True):
                make_stub(tensor, Blockwise(part, how, exact))
        else:
            found = quantize(read_values(old, self.folder).astype(np.float32), how)
            for tensor, array in zip(made, found, strict=True):
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
        self.weights |= {tensor.name: tensor for tensor in made}
        self.graph.initializer.extend(made)
        return values, scales, zeros

    def _recipe(self, tensor: Any) -> Any:
        from sdflow.weights.symbol import recipe_of

        return stub_recipe(tensor) if is_stub(tensor) else recipe_of(read_values(tensor, self.folder))

    def constant(self, name: str, values: Any) -> str:
        """The name of an initializer with these values, an array; made once."""
        import onnx

        if name not in self.weights:
            self.weights[name] = onnx.numpy_helper.from_array(values, name)
            self.graph.initializer.append(self.weights[name])
        return name

    def clean(self) -> None:
        """Drop nodes, initializers and value types that nothing reads any more, and put the nodes in order."""
        live: set[str] = set()
        wanted = [item.name for item in self.graph.output]
        while wanted:
            name = wanted.pop()
            if name and name not in live:
                live.add(name)
                node = self.producers.get(name)
                wanted += [*node.input, *node.output] if node is not None else []
        nodes = [copied(node) for node in in_order(self.graph.node) if live.intersection(node.output)]
        tensors = [copied(tensor) for tensor in self.graph.initializer if tensor.name in live]
        infos = [copied(info) for info in self.graph.value_info if info.name in live]
        for field, kept in (
            (self.graph.node, nodes),
            (self.graph.initializer, tensors),
            (self.graph.value_info, infos),
        ):
            del field[:]
            field.extend(kept)
        self.weights = {tensor.name: tensor for tensor in self.graph.initializer}
        self.refresh()
