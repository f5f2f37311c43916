"""A denoiser's step as two: one that also gives its deep features, and one that takes them and runs the outer layers alone.

A UNet goes down to few pixels and up again, and each layer on the way up reads, beside what comes from below, what a layer
on the way down left for it (a skip connection): the outermost layer what the very first convolution left. What comes from
below changes slowly from one step to the next (DeepCache, https://arxiv.org/abs/2312.00858). So it is cut there: above one of
these joins all runs anew, and what comes from below is kept.

The joins are found in the graph by what its nodes depend on, not by names: of two values that both come from the latents,
joined along the channels, the one is made of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.errors import UsageError
from sdflow.families.shared.approximation import REUSE
from sdflow.onnx_model.nodes import copied
from sdflow.runtime.denoiser.split import Parts


@dataclass(frozen=True)
class Depths:
    """whole: the step, a ModelProto, with a further output `features`. shallow: features, and of the step's inputs those that
    it still reads -> the step's outputs."""

    whole: Any
    shallow: Any
    features: str


def depths(parts: Parts, layers: int) -> Depths:
    """The two steps of a denoiser in parts. layers: how many joins lie above the cut.

    Raises UsageError for a graph without as many.
    """
    graph = parts.step.graph
    joins = skip_joins(graph, parts.moving.latents)
    if layers >= len(joins):  # above the lowest join lies all but the middle: nothing is won
        raise UsageError(
            f"its denoiser has {len(joins)} layers with a skip connection, and {layers} are to run in every step",
            where=REUSE,
            remedy=f"Take fewer layers than {len(joins)}; 1 is quickest."
            if len(joins) > 1
            else "Draw without it: this denoiser is no UNet.",
        )
    features = joins[-layers]
    types = {item.name: item.type for item in (*graph.input, *graph.value_info)}
    whole = copied(parts.step)
    if features not in {item.name for item in whole.graph.output}:
        whole.graph.output.add(name=features).type.CopyFrom(types[features])
    return Depths(whole, _above(parts.step, features, types[features]), features)


def skip_joins(graph: Any, latents: str) -> list[str]:
    """What comes from below at each join of the way up, in the order in which they run: the outermost last.

    graph: of a step, with the shapes of all values. latents: its input.
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
            for below, beside in (pair, pair[::-1]):
                if origins[beside] in made_of.get(below, frozenset()) and origins[beside] != origins[below]:
                    found.append(below)
        if read:
            reached = frozenset[str]().union(*read, watched.intersection(node.output))
            made_of.update(dict.fromkeys(filter(None, node.output), reached))
    return found


def _origin(name: str, producers: Mapping[str, Any]) -> str:
    """The value that this one is another form of: doubled for guidance, or in another layout."""
    while (node := producers.get(name)) is not None and (
        node.op_type in ("Transpose", "Identity", "Cast") or (node.op_type == "Concat" and len(set(node.input)) == 1)
    ):
        name = node.input[0]
    return name


def _joined(node: Any, ranks: Mapping[str, int]) -> tuple[str, str] | None:
    """The two values that a node joins along the channels of images, whichever their layout is."""
    if node.op_type != "Concat" or len(node.input) != 2 or node.input[0] == node.input[1]:
        return None
    axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
    images = all(ranks.get(name) == 4 for name in node.input)
    return (node.input[0], node.input[1]) if images and axis in (1, 3, -1, -3) else None


def _above(step: Any, features: str, kind: Any) -> Any:
    """The step without what its outputs do not need once the features are given."""
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
