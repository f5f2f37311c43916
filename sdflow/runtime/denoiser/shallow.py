"""Split a denoiser's step in two: one that also outputs its deep features, and one that reuses them in the outer
layers.

On a UNet's way up, each layer reads the output of the layer below and a skip connection from the way down; the
outermost reads the skip connection of the very first convolution. The output from below changes slowly from step to
step (DeepCache, https://arxiv.org/abs/2312.00858). So the graph is cut at one of these joins: everything above is
recomputed, and the value from below is reused.

Joins are found by dependencies in the graph, not by names: a Concat along the channels of two values that both depend
on the latents, one of which also depends on the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import REUSE
from sdflow.onnx_model.nodes import attribute, copied
from sdflow.runtime.denoiser.split import Parts


@dataclass(frozen=True)
class Depths:
    """Both steps. whole: the step's ModelProto with an additional output `features`. shallow: maps features and the
    step's inputs that it still reads to the step's outputs."""

    whole: Any
    shallow: Any
    features: str


def depths(parts: Parts, layers: int) -> Depths:
    """Return both steps of a split denoiser. layers: number of joins above the cut.

    Raises UsageError if the graph has too few.
    """
    graph = parts.step.graph
    joins = skip_joins(graph, parts.moving.latents)
    if layers >= len(joins):  # a cut at the lowest join would only skip the middle block
        raise UsageError(
            f"its denoiser has {len(joins)} layers with a skip connection, so {layers} cannot run in every step",
            where=REUSE,
            remedy=f"Use fewer than {len(joins)} layers; 1 is fastest."
            if len(joins) > 1
            else "Disable it: this denoiser is not a UNet.",
        )
    features = joins[-layers]
    types = {item.name: item.type for item in (*graph.input, *graph.value_info)}
    whole = copied(parts.step)
    if features not in {item.name for item in whole.graph.output}:
        whole.graph.output.add(name=features).type.CopyFrom(types[features])
    return Depths(whole, _above(parts.step, features, types[features]), features)


def skip_joins(graph: Any, latents: str) -> list[str]:
    """Return the value from below at each join on the way up, in execution order, outermost last.

    graph: a step's, with the shapes of all values. latents: its input.
    """
    ranks = {
        item.name: len(item.type.tensor_type.shape.dim) for item in (*graph.input, *graph.value_info, *graph.output)
    }
    producers = {name: node for node in graph.node for name in node.output if name}
    pairs = [_joined(node, ranks) for node in graph.node]
    origins = {name: _origin(name, producers) for pair in pairs if pair is not None for name in pair}
    watched = set(origins.values())
    made_of: dict[str, frozenset[str]] = {latents: frozenset()}
    found = []
    for node, pair in zip(graph.node, pairs, strict=True):
        read = [made_of[name] for name in node.input if name in made_of]
        if pair is not None:
            for below, skip in (pair, pair[::-1]):
                if origins[skip] in made_of.get(below, frozenset()) and origins[skip] != origins[below]:
                    found.append(below)
        if read:
            reached = frozenset[str]().union(*read, watched.intersection(node.output))
            made_of.update(dict.fromkeys(filter(None, node.output), reached))
    return found


def _origin(name: str, producers: Mapping[str, Any]) -> str:
    """Return the original of a value that was only doubled for guidance or changed in layout."""
    while (node := producers.get(name)) is not None and (
        node.op_type in ("Transpose", "Identity", "Cast") or (node.op_type == "Concat" and len(set(node.input)) == 1)
    ):
        name = node.input[0]
    return name


def _joined(node: Any, ranks: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the two values that a node concatenates along the channels of images, in either layout, or None."""
    if node.op_type != "Concat" or len(node.input) != 2 or node.input[0] == node.input[1]:
        return None
    axis = attribute(node, "axis", 0)
    images = all(ranks.get(name) == 4 for name in node.input)
    return (node.input[0], node.input[1]) if images and axis in (1, 3, -1, -3) else None


def _above(step: Any, features: str, kind: Any) -> Any:
    """Return the step reduced to what its outputs need if the features are given."""
    import onnx

    graph = step.graph
    wanted = {item.name for item in graph.output}
    nodes = []
    for node in reversed(graph.node):
        if wanted.intersection(set(node.output) - {features}):
            wanted.update(node.input)
            nodes.append(copied(node))
    model = onnx.ModelProto(ir_version=step.ir_version)
    model.opset_import.extend(step.opset_import)
    made = model.graph
    made.name = "shallow"
    made.node.extend(nodes[::-1])
    made.initializer.extend(copied(tensor) for tensor in _named(graph.initializer, wanted))
    made.input.extend(copied(item) for item in _named(graph.input, wanted))
    made.input.add(name=features).type.CopyFrom(kind)
    made.output.extend(copied(item) for item in graph.output)
    inner = {name for node in nodes for name in node.output}
    made.value_info.extend(copied(item) for item in _named(graph.value_info, inner))
    return model


def _named(items: Sequence[Any], names: set[str]) -> list[Any]:
    return [item for item in items if item.name in names]
