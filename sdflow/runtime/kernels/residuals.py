"""Residual sums, norms and modulations of a transformer, as operators of ours: see residual_norm.cu.

Found by what nodes compute and by the shapes of what they read, in a graph for fixed sizes:

    branch       Mul(gate, Add(bias, product)), with a SimplifiedLayerNormalization before the gate or without
    sum          Add(x, branch), or Add(Add(x, branch), branch)
    norm         LayerNormalization or SimplifiedLayerNormalization of it
    modulation   Add(Mul(norm, scale), shift), or one without shift; two of one norm at most

A gate, a scale, a shift is a row for each image. Where it is a Slice of a longer row, as one product gives all of a block's, the
operator reads that; where it is 1 + scale, the operator adds the 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.graph_index import GraphIndex
from sdflow.runtime.kernels.transformer_definitions import (
    BFLOAT16,
    LAYER_NORM,
    NO_NORM,
    PER_IMAGE,
    RESIDUAL_INPUTS,
    RMS_NORM,
)

VECTOR, MOST_AXES = 8, 5
"""As in residual_norm.c: channels of a vector; axes of a value."""
MOST_CHANNELS = 12288
"""Of a row: RESIDUAL_THREADS with RESIDUAL_HELD vectors each."""
NORMS = {"LayerNormalization": LAYER_NORM, "SimplifiedLayerNormalization": RMS_NORM}


@dataclass(frozen=True)
class Row:
    """A row for each image: the last axis of `value` from channel `first` on, plus 1 where `plus_one`."""

    value: str
    first: int = 0
    plus_one: bool = False


@dataclass(frozen=True)
class Branch:
    """What is added to a sum. gamma: of its own norm. nodes: their places, those of the sum's Add not among them."""

    value: str
    bias: str | None
    gamma: str | None
    epsilon: float
    gate: Row | None
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """result = x + branches. nodes: the places of all that is computed for it."""

    result: str
    x: str
    branches: tuple[Branch, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Modulation:
    """result = of what is read * scale + shift."""

    result: str
    scale: Row
    shift: Row | None
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Fused:
    """A node of ours for nodes at these places."""

    node: Any
    places: frozenset[int]


def residual_operators(index: GraphIndex) -> Iterator[Fused]:
    """Ours for all that is found; no node is in two of them."""
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


def _is_ours(index: GraphIndex, name: str) -> bool:
    """Of a type and shape that the kernel reads as rows of channels."""
    import onnx

    shape = index.shape(name)
    if index.element(name) not in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
        return False
    if not 3 <= len(shape) <= MOST_AXES or not all(shape):
        return False
    return shape[-1] % VECTOR == 0 and shape[-1] <= MOST_CHANNELS


def _row(index: GraphIndex, name: str, of: str, *, plus_one: bool = False) -> Row | None:
    """`name` as a row for each image of `of`, or for all. plus_one: whether a 1 that is added may be left to the kernel."""
    wanted, shape = index.shape(of), index.shape(name)
    images, channels = wanted[0], wanted[-1]
    padded = [1] * (len(wanted) - len(shape)) + shape
    if not shape or len(padded) != len(wanted) or padded[-1] != channels or padded[0] not in (1, images):
        return None
    if any(axis != 1 for axis in padded[1:-1]) or index.element(name) != index.element(of):
        return None
    rows, best, first, added = padded[0], Row(name), 0, False
    while True:
        whole, start = index.part(name)
        if start or whole != name:
            name, first = whole, first + start
        elif (inner := _unshaped(index, name)) is not None:
            name = inner
        elif plus_one and not added and (inner := _without_one(index, name)) is not None:
            name, added = inner, True
        else:
            return best
        shape = index.shape(name)
        if _count(shape[:-1]) == rows and shape[-1] % VECTOR == 0 and first % VECTOR == 0:
            best = Row(name, first, added)


def _unshaped(index: GraphIndex, name: str) -> str | None:
    """What a row was before axes of 1 were put in or taken out."""
    place = index.maker(name, "Unsqueeze", "Squeeze", "Reshape")
    if place is None:
        return None
    inner: str = index.nodes[place].input[0]
    shape = index.shape(inner)
    return inner if shape and shape[-1] == index.shape(name)[-1] else None


def _without_one(index: GraphIndex, name: str) -> str | None:
    place = index.maker(name, "Add")
    if place is None:
        return None
    for one, other in _both_ways(index, place):
        value = index.constant(one)
        if (
            value is not None
            and value.size == 1
            and float(value.item()) == 1
            and index.shape(other) == index.shape(name)
        ):
            return other
    return None


def _count(axes: Iterable[int]) -> int:
    product = 1
    for axis in axes:
        product *= axis
    return product


def _both_ways(index: GraphIndex, place: int) -> list[tuple[str, str]]:
    a, b = index.nodes[place].input
    return [(a, b), (b, a)]


def _is_channels(index: GraphIndex, name: str, of: str) -> bool:
    """One number for each channel."""
    return index.shape(name) == index.shape(of)[-1:] and index.element(name) == index.element(of)


def without_bias(index: GraphIndex, name: str) -> tuple[str, str, tuple[int, ...]] | None:
    """Where a value that is read once, or in one place, is something plus a bias: that, the bias, the Add's place."""
    place = index.maker(name, "Add")
    if place is None:
        return None
    for bias, value in _both_ways(index, place):
        if _is_channels(index, bias, name) and index.shape(value) == index.shape(name):
            return value, bias, (place,)
    return None


def _branch(index: GraphIndex, name: str, of: str) -> Branch | None:
    """`name` as a branch of a sum of the shape of `of`; None where it is no more than a value."""
    value, nodes = name, []
    gate: Row | None = None
    gamma, epsilon = None, 0.0
    if index.only_reader(value) is not None and (place := index.maker(value, "Mul")) is not None:
        for row, inner in _both_ways(index, place):
            if index.shape(inner) == index.shape(of) and (gate := _row(index, row, of)) is not None:
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
            and _is_channels(index, node.input[1], of)
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
    """Result -> sum."""
    found: dict[str, Sum] = {}
    for place, node in enumerate(index.nodes):
        if not index.is_plain(place, "Add") or not _is_ours(index, node.output[0]):
            continue
        result = node.output[0]
        for x, other in _both_ways(index, place):
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
    """With the branch of the sum `before` that this one alone reads, where neither has a norm."""
    if before is None or len(before.branches) > 1 or before.branches[0].gamma or of.branches[0].gamma:
        return of
    return Sum(of.result, before.x, (*before.branches, *of.branches), (*of.nodes, *before.nodes))


def _modulations(index: GraphIndex, taken: set[int]) -> dict[str, list[Modulation]]:
    """Value -> how it is scaled and shifted, by image. taken: the places of other patterns' nodes."""
    found: dict[str, list[Modulation]] = {}
    for place, node in enumerate(index.nodes):
        if place in taken or not index.is_plain(place, "Mul") or not _is_ours(index, node.output[0]):
            continue
        result = node.output[0]
        for row, value in _both_ways(index, place):
            scale = _row(index, row, result, plus_one=True) if index.shape(value) == index.shape(result) else None
            if scale is None:
                continue
            shift: Row | None = None
            nodes: tuple[int, ...] = (place,)
            behind = index.only_reader(result)
            if behind is not None and behind not in taken and index.is_plain(behind, "Add"):
                (other,) = (other for mine, other in _both_ways(index, behind) if mine == result)
                if (shift := _row(index, other, result)) is not None:
                    nodes, result = (place, behind), index.nodes[behind].output[0]
            found.setdefault(value, []).append(Modulation(result, scale, shift, nodes))
            break
    return found


def _is_last_axis(index: GraphIndex, place: int) -> bool:
    rank = len(index.shape(index.nodes[place].input[0]))
    return index.attribute(place, "axis", -1) in (-1, rank - 1) and not any(index.nodes[place].output[1:])


def _norm(index: GraphIndex, place: int, before: Sum | None, behind: list[Modulation]) -> Fused | None:
    """The norm at a place with the sum that it is of and what modulates it, if there is one of both at least."""
    node = index.nodes[place]
    value, result = node.input[0], node.output[0]
    if not _is_ours(index, value) or not _is_last_axis(index, place):
        return None
    if any(name and not _is_channels(index, name, value) for name in node.input[1:]):
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
    """Whether what modulates can be computed before these nodes are."""
    rows = [row.value for each in behind for row in (each.scale, each.shift) if row is not None]
    return not index.depends(rows, nodes)


def _made(index: GraphIndex, of: Sum | str, norm: int | None, behind: list[Modulation]) -> Fused:
    """Our node for a sum or a value, the norm at a place and its modulations."""
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
