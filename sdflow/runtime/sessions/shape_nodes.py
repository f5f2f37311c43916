"""Nodes that only compute shapes, which GPU providers leave to the CPU, and whether a session has others there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sdflow.targets import CPU_PROVIDER

if TYPE_CHECKING:
    import onnxruntime

SMALL_INITIALIZER = 100
"""Number of elements; as kSmallInitializerThreshold in ONNX Runtime's core/framework/fallback_cpu_capability.cc."""

_SHAPE_SOURCES = frozenset({"Shape", "Size"})


def runs_on_device(session: onnxruntime.InferenceSession, graph: Any) -> bool:
    """Whether no node of this graph runs on the CPU, apart from those that only compute shapes."""
    if not hasattr(session, "get_provider_graph_assignment_info"):  # an older ONNX Runtime
        return False
    shapes = {node.name for node in shape_nodes(graph.graph)}
    return all(
        part.ep_name != CPU_PROVIDER or all(node.name in shapes for node in part.get_nodes())
        for part in session.get_provider_graph_assignment_info()
    )


def shape_nodes(graph: Any) -> list[Any]:
    """Return the nodes of a graph that only compute shapes.

    These are Shape and Size, and nodes with an input from such a node whose other inputs are from such nodes too,
    constants, or initializers of at most 100 elements. This is the rule of ONNX Runtime's GetCpuPreferredNodes without
    its allowance for graph inputs, which are data: nodes that ONNX Runtime moves beyond it count as fallen.
    """
    known = {tensor.name for tensor in graph.initializer if math.prod(tensor.dims) <= SMALL_INITIALIZER}
    from_shapes: set[str] = set()
    found = []
    for node in graph.node:  # in topological order, as ONNX requires
        inputs = [name for name in node.input if name]
        if node.op_type == "Constant":
            known.update(node.output)
        elif node.op_type in _SHAPE_SOURCES or (
            any(name in from_shapes for name in inputs) and all(name in from_shapes or name in known for name in inputs)
        ):
            from_shapes.update(node.output)
            found.append(node)
    return found
