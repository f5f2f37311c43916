"""Speed up the search for fusions in onnxruntime.transformers without changing its result.

Two pure functions, called repeatedly with the same arguments, took more than half of the time on Stable Diffusion 1.5's
UNet (4,292 nodes); a third part took a fifth of the rest. `benchmarks/build/fusion.py` measures each saving:

- Maps from a tensor's name to the nodes that read or write it were rebuilt from the whole graph for each lookup (2,203
  times). Here the last maps are kept while the graph's serialized bytes are unchanged.
- `sympy.simplify` and `str` were applied to the same expressions in each of twenty rounds of shape inference. Here
  results are cached.
- Each round of shape inference orders the nodes by sweeping the whole graph until every output is reached. Here its
  copy of the graph is sorted in that order once, so a single sweep suffices.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from operator import is_
from typing import Any

from sdflow.processes.patched import patched

# onnxruntime.transformers adds its own folder to sys.path, so its modules exist twice.
PREFIXES = ("", "onnxruntime.transformers.")

# Methods of OnnxModel that search the graph and build a map on every call unless given one.
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
    """Patch the slow functions in this process while active. For graphs that are small without weights."""
    with kept_maps(), kept_expressions(), nodes_in_order():
        yield


@contextmanager
def kept_maps() -> Iterator[None]:
    """Cache the maps of the last graph."""
    importlib.import_module("onnxruntime.transformers.optimizer")  # adds its folder to sys.path
    with ExitStack() as stack:
        for prefix in PREFIXES:
            model = importlib.import_module(f"{prefix}onnx_model").OnnxModel
            maps = _Maps()
            mended = {
                "input_name_to_nodes": maps.looked_up(model.input_name_to_nodes, _readers),
                "output_name_to_node": maps.looked_up(model.output_name_to_node, _writers),
                **{name: _searching(getattr(model, name), maps) for name in SEARCHES},
            }
            stack.enter_context(patched(model, **mended))
        yield


@contextmanager
def kept_expressions() -> Iterator[None]:
    """Cache sympy's results for recent expressions."""
    import sympy
    from sympy.core._print_helpers import Printable

    printed = _kept(Printable.__str__)

    def spelled(self: Any) -> Any:
        return printed(self)

    with patched(sympy, simplify=_kept(sympy.simplify)), patched(Printable, __str__=spelled, __repr__=spelled):
        yield


@contextmanager
def nodes_in_order() -> Iterator[None]:
    """Sort the nodes for shape inference in the order it would find."""
    importlib.import_module("onnxruntime.transformers.optimizer")
    with ExitStack() as stack:
        for prefix in PREFIXES:
            helper = importlib.import_module(f"{prefix}shape_infer_helper").SymbolicShapeInferenceHelper
            stack.enter_context(patched(helper, _preprocess=_preprocessing(helper._preprocess)))
        yield


def _preprocessing(original: Any) -> Any:
    def preprocess(self: Any, model: Any) -> None:
        original(self, model)
        graph = self.out_mp_.graph
        order = order_of_sweeps(graph)
        if order is not None:
            nodes = [graph.node[index] for index in order]
            del graph.node[:]
            graph.node.extend(nodes)

    return preprocess


def order_of_sweeps(graph: Any) -> list[int] | None:
    """Return the order in which sweeps over the graph's nodes, each taking nodes with known inputs, take them until
    every output is known; nodes that no output needs may be omitted. None if the graph is not that simple, or already
    in order."""
    known = {each.name for each in (*graph.input, *graph.initializer)}
    outputs = [each.name for each in graph.output]
    made = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    if known & {*made, *outputs} or any(each.HasField("g") for node in graph.node for each in node.attribute):
        return None
    needed = [[made.get(name, -1) for name in node.input if name and name not in known] for node in graph.node]
    sweeps: dict[int, int] = {}
    waiting = list(range(len(needed)))
    while waiting:
        later = []
        for index in waiting:
            if all(each in sweeps for each in needed[index]):
                sweeps[index] = max((sweeps[each] + (each > index) for each in needed[index]), default=1)
            else:
                later.append(index)
        if len(later) == len(waiting):
            return None  # a cycle, or a value without a producer
        waiting = later
    last = max((sweeps.get(made.get(name, -1), 0) for name in outputs), default=0)
    if last <= 1 or any(name not in made for name in outputs):
        return None
    return sorted((index for index, sweep in sweeps.items() if sweep <= last), key=lambda index: (sweeps[index], index))


class _Maps:
    """Cache of the last graph's maps."""

    def __init__(self) -> None:
        self._bytes = b""
        self._nodes: list[Any] = []
        self._made: dict[Any, dict[str, Any]] = {}

    def get(self, model: Any, make: Callable[[list[Any]], dict[str, Any]]) -> dict[str, Any]:
        """Return `make(nodes)` for the model's graph, cached while the graph is unchanged. Do not modify the result."""
        content = model.model.graph.SerializeToString()
        nodes = list(model.model.graph.node)
        # Equal but different node objects need a new map, or changes to the old objects would be lost.
        same = len(nodes) == len(self._nodes) and all(map(is_, nodes, self._nodes))
        if not same or content != self._bytes:
            self._bytes, self._nodes, self._made = content, nodes, {}
        if make not in self._made:
            self._made[make] = make(nodes)
        return self._made[make]

    def looked_up(self, original: Any, make: Callable[[list[Any]], dict[str, Any]]) -> Any:
        """Wrap `original`, a method of OnnxModel that builds a map, with the cache."""

        def method(model: Any, exclude_subgraphs: bool = False) -> dict[str, Any]:
            if exclude_subgraphs or len(model.graphs()) > 1:
                return original(model, exclude_subgraphs)  # type: ignore[no-any-return]
            made = self.get(model, make)  # copied, since callers may change what they get
            return {name: list(found) if isinstance(found, list) else found for name, found in made.items()}

        return method


def _searching(original: Any, maps: _Maps) -> Any:
    """Wrap `original`, a method that searches the graph, to pass it the cached map."""
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


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function of one sympy expression. Equal expressions of different types are distinguished."""

    @lru_cache(maxsize=1 << 16)
    def compute(_kind: Hashable, expression: Any) -> Any:
        return function(expression)

    def kept(expression: Any, **options: Any) -> Any:
        try:
            return function(expression, **options) if options else compute(str(type(expression)), expression)
        except TypeError:  # not hashable
            return function(expression, **options)

    return kept
