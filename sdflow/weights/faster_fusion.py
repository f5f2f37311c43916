"""The search for fusions in onnxruntime.transformers, faster, with the same result.

Measured on the UNet of SD1.5 (4292 nodes), two thirds of the time went into two things that are pure functions of what
they are given, and are asked for the same again and again:

- maps from a tensor's name to the nodes that read or write it, made anew from the whole graph for a single look-up
  (2,203 times). Here the last ones are kept as long as the graph's serialized bytes are the same.
- `sympy.simplify` and `str` of the same expressions, in each of twenty rounds of shape inference. Here the last results
  are kept.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
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
            for name in SEARCHES:
                replace(model, name, _searching(getattr(model, name), maps))
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
        same = len(nodes) == len(self._nodes) and all(map(operator.is_, nodes, self._nodes))
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
        for node in graph.node:
            if old_input_name in node.input:
                for index, name in enumerate(node.input):
                    if name == old_input_name:
                        node.input[index] = new_input_name


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
