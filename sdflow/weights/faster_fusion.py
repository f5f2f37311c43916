"""The search for fusions in onnxruntime.transformers, faster, with the same result.

Measured on the UNet of SD1.5 (4292 nodes), most of the time went into a few things that are pure functions of what they
are given, and are asked for the same again and again:

- maps from a tensor's name to the nodes that read or write it, made anew from the whole graph for a single look-up
  (2,203 times). Here the last ones are kept as long as the graph's serialized bytes are the same.
- `sympy.simplify` and `str` of the same expressions, in each of twenty rounds of shape inference. Here the last results
  are kept.
- the order of the nodes for shape inference, found by going over all nodes until every one has had its inputs before it:
  hundreds of times over a graph to whose end fusions have added nodes. Here it is computed.
- all nodes of a type, the Constant of a name, the readers of a name, whether a node is still there: by going through all
  nodes, thousands of times. Here that is done by functions of the interpreter's own.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import compress, repeat
from operator import attrgetter, contains, is_
from typing import Any

# onnxruntime.transformers puts its own folder onto sys.path: its modules exist twice.
PREFIXES = ("", "onnxruntime.transformers.")


# Methods of OnnxModel that only look around in the graph, and make a map at every step if they are not given one.
SEARCHES = (
    "find_first_child_by_type",
    "find_first_parent_by_type",
    "get_children",
    "get_children_subgraph_nodes",
    "get_parent",
    "get_parents",
    "match_child_path",
    "match_parent",
    "match_parent_path",
)


@contextmanager
def faster_fusion() -> Iterator[None]:
    """Replace the slow places in this process until the end. For graphs that are small without their weights."""
    import sympy
    from sympy.core._print_helpers import Printable

    importlib.import_module("onnxruntime.transformers.optimizer")  # puts its folder onto sys.path
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for prefix in PREFIXES:
            model = importlib.import_module(f"{prefix}onnx_model").OnnxModel
            maps = _Maps()
            replace(model, "input_name_to_nodes", maps.looked_up(model.input_name_to_nodes, _readers))
            replace(model, "output_name_to_node", maps.looked_up(model.output_name_to_node, _writers))
            replace(model, "replace_input_of_all_nodes", _replace_input_of_all_nodes)
            replace(model, "nodes", _nodes(model.nodes))
            replace(model, "get_nodes_by_op_type", _nodes_by_op_type(model.get_nodes_by_op_type))
            replace(model, "get_graph_by_node", _graph_by_node(model.get_graph_by_node))
            replace(model, "get_constant_value", _constant_value(model.get_constant_value))
            for name in SEARCHES:
                replace(model, name, _searching(getattr(model, name), maps))
        inference = importlib.import_module("shape_infer_helper").SymbolicShapeInference
        replace(inference, "_infer_impl", _in_order(inference._infer_impl))
        replace(sympy, "simplify", _kept(sympy.simplify))
        printed = _kept(Printable.__str__)
        replace(Printable, "__str__", lambda self: printed(self))
        replace(Printable, "__repr__", lambda self: printed(self))
        yield


class _Maps:
    """The maps of the graph that was asked for last."""

    def __init__(self) -> None:
        self._bytes = b""
        self._nodes: list[Any] = []
        self._made: dict[Any, dict[str, Any]] = {}

    def get(self, model: Any, make: Callable[[list[Any]], dict[str, Any]]) -> dict[str, Any]:
        """`make(nodes)` of the model's graph, or what it gave for this very graph before. Not to be changed."""
        content = model.model.graph.SerializeToString()
        nodes = list(model.model.graph.node)
        # Equal nodes in the place of those that were there are others: a change to the old ones would be lost.
        same = len(nodes) == len(self._nodes) and all(map(is_, nodes, self._nodes))
        if not same or content != self._bytes:
            self._bytes, self._nodes, self._made = content, nodes, {}
        if make not in self._made:
            self._made[make] = make(nodes)
        return self._made[make]

    def looked_up(self, original: Any, make: Callable[[list[Any]], dict[str, Any]]) -> Any:
        """`original`, a method of OnnxModel that makes a map, with its result kept."""

        def method(model: Any, exclude_subgraphs: bool = False) -> dict[str, Any]:
            if exclude_subgraphs or len(model.graphs()) > 1:
                return original(model, exclude_subgraphs)  # type: ignore[no-any-return]
            made = self.get(model, make)  # copied, since callers may change what they get
            return {name: list(found) if isinstance(found, list) else found for name, found in made.items()}

        return method


def _searching(original: Any, maps: _Maps) -> Any:
    """`original`, a method that searches the graph, given the map that it would make for itself."""
    signature = inspect.signature(original)
    wanted = {"input_name_to_nodes": _readers, "output_name_to_node": _writers}
    (name, make), *none = [item for item in wanted.items() if item[0] in signature.parameters]
    assert not none, "no method takes both"
    position = list(signature.parameters).index(name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        given = options.get(name) if len(args) < position else args[position - 1]
        if given is None and len(self.graphs()) == 1:
            arguments = signature.bind(self, *args, **options)
            arguments.arguments[name] = maps.get(self, make)
            return original(*arguments.args, **arguments.kwargs)
        return original(self, *args, **options)

    return method


def _readers(nodes: list[Any]) -> dict[str, Any]:
    readers: dict[str, Any] = {}
    for node in nodes:
        for name in node.input:
            if name:
                readers.setdefault(name, []).append(node)
    return readers


def _writers(nodes: list[Any]) -> dict[str, Any]:
    return {name: node for node in nodes for name in node.output if name}


def _replace_input_of_all_nodes(self: Any, old_input_name: str, new_input_name: str) -> None:
    for graph in self.graphs():
        nodes = list(graph.node)
        for node in compress(nodes, map(contains, map(attrgetter("input"), nodes), repeat(old_input_name))):
            for index, name in enumerate(node.input):
                if name == old_input_name:
                    node.input[index] = new_input_name


def _nodes(original: Any) -> Any:
    def nodes(self: Any) -> list[Any]:
        return list(self.model.graph.node) if len(self.graphs()) == 1 else original(self)

    return nodes


def _nodes_by_op_type(original: Any) -> Any:
    def get_nodes_by_op_type(self: Any, op_type: str) -> list[Any]:
        if len(self.graphs()) > 1:
            return original(self, op_type)  # type: ignore[no-any-return]
        return _of_type(self.model.graph, op_type)

    return get_nodes_by_op_type


def _of_type(graph: Any, op_type: str) -> list[Any]:
    nodes = list(graph.node)
    return list(compress(nodes, map(op_type.__eq__, map(attrgetter("op_type"), nodes))))


def _graph_by_node(original: Any) -> Any:
    def get_graph_by_node(self: Any, node: Any) -> Any:
        one = len(self.graphs()) == 1 and any(map(is_, self.model.graph.node, repeat(node)))
        return self.model.graph if one else original(self, node)  # which compares nodes by all their content

    return get_graph_by_node


def _constant_value(original: Any) -> Any:
    import onnx

    def get_constant_value(self: Any, output_name: str) -> Any:
        if len(self.graphs()) > 1:
            return original(self, output_name)
        for node in _of_type(self.model.graph, "Constant"):
            if node.output[0] == output_name:
                for attribute in node.attribute:
                    if attribute.name == "value":
                        return onnx.numpy_helper.to_array(attribute.t)
        initializer = self.get_initializer(output_name)
        return None if initializer is None else onnx.numpy_helper.to_array(initializer)

    return get_constant_value


def _in_order(original: Any) -> Any:
    """`SymbolicShapeInference._infer_impl`, which sorts the nodes by sweeps, given them in the order it would find."""
    import onnx

    def infer(self: Any, *args: Any, **options: Any) -> Any:
        graph = self.out_mp_.graph
        order = swept_order(graph)
        if order is None:
            return original(self, *args, **options)
        before = onnx.GraphProto()
        before.node.extend(graph.node)
        del graph.node[:]
        graph.node.extend(before.node[index] for index in order)
        try:
            return original(self, *args, **options)
        finally:
            del graph.node[:]
            graph.node.extend(before.node)

    return infer


def swept_order(graph: Any) -> list[int] | None:
    """The indices of a GraphProto's nodes in the order in which repeated sweeps over them find all inputs known.

    The sweeps end with the one that finds the last output of the graph: what only a later one would find is left out.
    None if there is nothing to gain, or to find: inner graphs, outputs that nothing gives.
    """
    nodes = list(graph.node)
    known = {item.name for item in (*graph.input, *graph.initializer)}
    outputs = {item.name for item in graph.output}
    writer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    inner = any(attribute.HasField("g") or attribute.graphs for node in nodes for attribute in node.attribute)
    unique = len(writer) == sum(bool(name) for node in nodes for name in node.output)
    if inner or not unique or known & writer.keys() or not outputs <= writer.keys():
        return None
    needs = [{writer.get(name, -1) for name in node.input if name and name not in known} for node in nodes]
    readers: dict[int, list[int]] = {}
    for index, found in enumerate(needs):
        for before in found:
            readers.setdefault(before, []).append(index)
    left = [len(found) for found in needs]
    ready = [index for index, count in enumerate(left) if count == 0]
    sweep = dict.fromkeys(ready, 1)
    for index in ready:  # grows
        for after in readers.get(index, ()):
            sweep[after] = max(sweep.get(after, 1), sweep[index] + (index > after))
            left[after] -= 1
            if left[after] == 0:
                ready.append(after)
    if any(writer[name] not in sweep or left[writer[name]] for name in outputs):
        return None
    last = max(sweep[writer[name]] for name in outputs)
    order = sorted((sweep[index], index) for index in ready if sweep[index] <= last)
    return None if last == 1 else [index for _, index in order]


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one sympy expression, with its last results kept. Types are told apart, even if equal."""

    @lru_cache(maxsize=1 << 16)
    def compute(_kind: Hashable, expression: Any) -> Any:
        return function(expression)

    def kept(expression: Any, **options: Any) -> Any:
        try:
            return function(expression, **options) if options else compute(str(type(expression)), expression)
        except TypeError:  # not hashable
            return function(expression, **options)

    return kept
