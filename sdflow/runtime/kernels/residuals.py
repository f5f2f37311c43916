"""Fuse residual sums, norms and modulations of a transformer into sdflow's operators (residual_norm.cu).

They are matched by operators and input shapes, in a graph of fixed sizes:

    branch       Mul(gate, Add(bias, product)), optionally with a SimplifiedLayerNormalization before the gate
    sum          Add(x, branch), or Add(Add(x, branch), branch)
    norm         LayerNormalization or SimplifiedLayerNormalization of it
    modulation   Add(Mul(norm, scale), shift), or one without shift; at most two per norm

Gates, scales and shifts are one row per image. If one is a Slice of a longer row, such as one product for a whole block,
the operator reads that row; for 1 + scale, the operator adds the 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.channel_rows import Row, both_ways, has_rows, is_by_channel, row_of, without_bias
from sdflow.runtime.kernels.graph_index import GraphIndex
from sdflow.runtime.kernels.transformer_definitions import (
    BFLOAT16,
    LAYER_NORM,
    NO_NORM,
    PER_IMAGE,
    RESIDUAL_INPUTS,
    RMS_NORM,
)

NORMS = {"LayerNormalization": LAYER_NORM, "SimplifiedLayerNormalization": RMS_NORM}


@dataclass(frozen=True)
class Branch:
    """A summand. gamma: of its own norm. nodes: indices of its nodes, without the sum's Add."""

    value: str
    bias: str | None
    gamma: str | None
    epsilon: float
    gate: Row | None
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """result = x + branches. nodes: indices of all its nodes."""

    result: str
    x: str
    branches: tuple[Branch, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Modulation:
    """result = input * scale + shift."""

    result: str
    scale: Row
    shift: Row | None
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Fused:
    """A replacement for the nodes at these indices."""

    node: Any
    places: frozenset[int]


def residual_operators(index: GraphIndex) -> Iterator[Fused]:
    """Yield all fused operators; their nodes do not overlap."""
    sums = _sums(index)
    taken = {place for each in sums.values() for place in each.nodes}
    modulations = _modulations(index, taken)
    done: set[int] = set()
    for place, node in enumerate(index.nodes):
        if not index.is_plain(place, *NORMS) or place in taken:
            continue
        before = sums.get(node.input[0])
        if before is not None and done.intersection(before.nodes):
            before = None  # another norm of the same sum
        fused = _norm(index, place, before, modulations.get(node.output[0], []))
        if fused is not None:
            done |= fused.places
            yield fused
    for each in sums.values():
        if not done.intersection(each.nodes):
            done.update(each.nodes)
            yield _made(index, each, None, [])
    for value, found in modulations.items():
        rest = [each for each in found if each.shift and not done.intersection(each.nodes)]
        for first in range(0, len(rest), 2):
            pair = rest[first : first + 2]
            if _is_free(index, pair, [place for each in pair for place in each.nodes]):
                done.update(place for each in pair for place in each.nodes)
                yield _made(index, value, None, pair)


def _branch(index: GraphIndex, name: str, of: str) -> Branch | None:
    """Return `name` as a branch of a sum with the shape of `of`, or None if it is just a value."""
    value, nodes = name, []
    gate: Row | None = None
    gamma, epsilon = None, 0.0
    if index.only_reader(value) is not None and (place := index.maker(value, "Mul")) is not None:
        for row, inner in both_ways(index, place):
            if index.shape(inner) == index.shape(of) and (gate := row_of(index, row, of)) is not None:
                value = inner
                nodes.append(place)
                break
    if (
        index.only_reader(value) is not None
        and (place := index.maker(value, "SimplifiedLayerNormalization")) is not None
    ):
        node = index.nodes[place]
        if (
            _is_last_axis(index, place)
            and is_by_channel(index, node.input[1], of)
            and index.shape(node.input[0]) == index.shape(of)
        ):
            value, gamma, epsilon = node.input[0], node.input[1], index.attribute(place, "epsilon", 1e-5)
            nodes.append(place)
    if gate is None and gamma is None:
        return None
    bias = None
    if index.only_reader(value) is not None and (found := without_bias(index, value)) is not None:
        value, bias, places = found
        nodes += places
    return Branch(value, bias, gamma, epsilon, gate, tuple(nodes))


def _sums(index: GraphIndex) -> dict[str, Sum]:
    """Return result -> sum."""
    found: dict[str, Sum] = {}
    for place, node in enumerate(index.nodes):
        if not index.is_plain(place, "Add") or not has_rows(index, node.output[0]):
            continue
        result = node.output[0]
        for x, other in both_ways(index, place):
            if index.shape(x) == index.shape(result) == index.shape(other):
                branch = _branch(index, other, result)
                if branch is not None:
                    single = Sum(result, x, (branch,), (place, *branch.nodes))
                    found[result] = _joined(single, found.get(x) if index.only_reader(x) is not None else None)
                    if len(found[result].branches) == 2:
                        del found[x]
                    break
    return found


def _joined(of: Sum, before: Sum | None) -> Sum:
    """Merge the sum `before`, which only `of` reads, into it, unless either has a norm."""
    if before is None or len(before.branches) > 1 or before.branches[0].gamma or of.branches[0].gamma:
        return of
    return Sum(of.result, before.x, (*before.branches, *of.branches), (*of.nodes, *before.nodes))


def _modulations(index: GraphIndex, taken: set[int]) -> dict[str, list[Modulation]]:
    """Return value -> its per-image scales and shifts. taken: indices of other patterns' nodes."""
    found: dict[str, list[Modulation]] = {}
    for place, node in enumerate(index.nodes):
        if place in taken or not index.is_plain(place, "Mul") or not has_rows(index, node.output[0]):
            continue
        result = node.output[0]
        for row, value in both_ways(index, place):
            scale = row_of(index, row, result, plus_one=True) if index.shape(value) == index.shape(result) else None
            if scale is None:
                continue
            shift: Row | None = None
            nodes: tuple[int, ...] = (place,)
            behind = index.only_reader(result)
            if behind is not None and behind not in taken and index.is_plain(behind, "Add"):
                (other,) = (other for mine, other in both_ways(index, behind) if mine == result)
                if (shift := row_of(index, other, result)) is not None:
                    nodes, result = (place, behind), index.nodes[behind].output[0]
            found.setdefault(value, []).append(Modulation(result, scale, shift, nodes))
            break
    return found


def _is_last_axis(index: GraphIndex, place: int) -> bool:
    rank = len(index.shape(index.nodes[place].input[0]))
    return index.attribute(place, "axis", -1) in (-1, rank - 1) and not any(index.nodes[place].output[1:])


def _norm(index: GraphIndex, place: int, before: Sum | None, behind: list[Modulation]) -> Fused | None:
    """Fuse the norm at `place` with its sum and its modulations, if it has at least one of these."""
    node = index.nodes[place]
    value, result = node.input[0], node.output[0]
    if not has_rows(index, value) or not _is_last_axis(index, place):
        return None
    if any(name and not is_by_channel(index, name, value) for name in node.input[1:]):
        return None
    if len(behind) > 2 or sorted(index.readers(result)) != sorted(each.nodes[0] for each in behind):
        behind = []
    if before is None and not behind:
        return None
    places = {place, *(one for each in behind for one in each.nodes)}
    if not _is_free(index, behind, [*places, *(before.nodes[:1] if before else ())]):
        return None
    return _made(index, before or value, place, behind)


def _is_free(index: GraphIndex, behind: list[Modulation], nodes: list[int]) -> bool:
    """Whether the modulations can be computed before these nodes."""
    rows = [row.value for each in behind for row in (each.scale, each.shift) if row is not None]
    return not index.depends(rows, nodes)


def _made(index: GraphIndex, of: Sum | str, norm: int | None, behind: list[Modulation]) -> Fused:
    """Return the fused node for a sum or a value, the norm at an index, and its modulations."""
    import onnx

    given: dict[str, str] = {"x": of if isinstance(of, str) else of.x}
    attributes: dict[str, Any] = {"norm": NO_NORM, "plus_one": 0, "epsilon": 0.0, "branch_epsilon": 0.0}
    attributes |= dict.fromkeys(PER_IMAGE, 0)
    places: set[int] = set()

    def give(name: str, row: Row | None) -> None:
        if row is not None:
            given[name], attributes[name] = row.value, row.first

    for number, branch in zip(("", "2"), of.branches if isinstance(of, Sum) else (), strict=False):
        optional = (("", branch.value), ("_bias", branch.bias), ("_gamma", branch.gamma))
        given |= {f"branch{number}{part}": name for part, name in optional if name is not None}
        give(f"gate{number}", branch.gate)
        attributes["branch_epsilon"] = branch.epsilon
    if isinstance(of, Sum):
        places.update(of.nodes)
    results = []
    if norm is not None:
        node = index.nodes[norm]
        places.add(norm)
        attributes |= {"norm": NORMS[node.op_type], "epsilon": index.attribute(norm, "epsilon", 1e-5)}
        gamma, beta = (*node.input[1:], "", "")[:2]
        given |= {
            name: value
            for name, value, trivial in (("gamma", gamma, 1), ("beta", beta, 0))
            if value and not _is_all(index, value, trivial)
        }
        if "beta" in given:
            given["gamma"] = gamma
        results = [node.output[0]]
    for number, each in zip(("", "2"), behind, strict=False):
        give(f"scale{number}", each.scale)
        give(f"shift{number}", each.shift)
        attributes["plus_one"] |= each.scale.plus_one << len(number)
        places.update(each.nodes)
    results = [each.result for each in behind] or results
    op_type = "ModulatedNorm"
    if isinstance(of, Sum):
        op_type = "GatedResidualNorm" if results else "GatedResidual"
        results.insert(1, of.result)
    inputs = [given.get(name, "") for name in RESIDUAL_INPUTS]
    while not inputs[-1]:
        inputs.pop()
    name = f"{results[0]}/{op_type}"
    if index.element(given["x"]) == onnx.TensorProto.BFLOAT16:
        op_type += BFLOAT16
    node = onnx.helper.make_node(op_type, inputs, results, name, domain=DOMAIN, **attributes)
    return Fused(node, frozenset(places))


def _is_all(index: GraphIndex, name: str, value: float) -> bool:
    found = index.constant(name)
    return found is not None and bool((found.astype(float) == value).all())
