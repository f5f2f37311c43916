"""Fuse activations between two products of a transformer into sdflow's operators (gated_activation.cu).

    SiluGated    Mul(Mul(a, Sigmoid(a)), b)
    TanhGelu     FastGelu(a), if that saves more than one pass

a and b may be an Add of a product and a bias, and a Slice or Split of a longer row. If a Concat puts another value
before the result, the operator writes that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sdflow.onnx_model.float8 import DOMAIN
from sdflow.runtime.kernels.channel_rows import MOST_AXES, VECTOR, without_bias
from sdflow.runtime.kernels.graph_index import GraphIndex
from sdflow.runtime.kernels.residuals import Fused
from sdflow.runtime.kernels.transformer_definitions import ACTIVATION_INPUTS, BFLOAT16


@dataclass(frozen=True)
class _Columns:
    """Channels of `value` from `first` on, plus a bias. nodes: indices of the nodes it replaces."""

    value: str
    first: int
    bias: str | None
    nodes: tuple[int, ...]


def activation_operators(index: GraphIndex) -> Iterator[Fused]:
    """Yield all fused operators."""
    for place, node in enumerate(index.nodes):
        if index.is_plain(place, "Sigmoid"):
            fused = _gated(index, place)
        elif (node.domain, node.op_type) == ("com.microsoft", "FastGelu"):
            fused = _gelu(index, place)
        else:
            continue
        if fused is not None:
            yield fused


def _is_ours(index: GraphIndex, name: str) -> bool:
    import onnx

    shape = index.shape(name)
    if index.element(name) not in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
        return False
    return 2 <= len(shape) <= MOST_AXES and all(shape) and shape[-1] % VECTOR == 0


def _gated(index: GraphIndex, sigmoid: int) -> Fused | None:
    a, gate = index.nodes[sigmoid].input[0], index.nodes[sigmoid].output[0]
    silu = index.only_reader(gate)
    if not _is_ours(index, a) or silu is None or not index.is_plain(silu, "Mul"):
        return None
    if sorted(index.nodes[silu].input) != sorted((a, gate)) or sorted(index.readers(a)) != sorted((sigmoid, silu)):
        return None
    middle = index.nodes[silu].output[0]
    last = index.only_reader(middle)
    if last is None or not index.is_plain(last, "Mul"):
        return None
    (b,) = (name for name in index.nodes[last].input if name != middle)
    if index.shape(b) != index.shape(a):
        return None
    nodes = (sigmoid, silu, last)
    return _made(index, "SiluGated", _columns(index, a, nodes), _columns(index, b, nodes), nodes)


def _gelu(index: GraphIndex, place: int) -> Fused | None:
    node = index.nodes[place]
    if not _is_ours(index, node.input[0]):
        return None
    a = _columns(index, node.input[0], (place,))
    if len(node.input) > 1 and node.input[1]:
        if a.bias is not None or index.shape(node.input[1]) != index.shape(node.input[0])[-1:]:
            return None
        a = _Columns(a.value, a.first, node.input[1], a.nodes)
    fused = _made(index, "TanhGelu", a, None, (place,))
    return fused if a.bias or a.value != node.input[0] or len(fused.places) > 1 else None


def _columns(index: GraphIndex, name: str, readers: tuple[int, ...]) -> _Columns:
    """Return the columns behind `name`. readers: nodes that must be its only readers for its bias to be absorbed."""
    bias: str | None = None
    nodes: tuple[int, ...] = ()
    plain = name
    read = set(index.readers(name))
    if read and read <= set(readers) and (found := without_bias(index, name)) is not None:
        plain, bias, nodes = found
    value, first = index.part(plain)
    if first % VECTOR or index.shape(value)[-1] % VECTOR:
        value, first = plain, 0
    return _Columns(value, first, bias, nodes)


def _made(index: GraphIndex, op_type: str, a: _Columns, b: _Columns | None, nodes: tuple[int, ...]) -> Fused:
    """Return the fused node for these nodes, the last of which produces the result."""
    import onnx

    result = index.nodes[nodes[-1]].output[0]
    channels, element = index.shape(result)[-1], index.element(result)
    places = {*nodes, *a.nodes, *(b.nodes if b else ())}
    given = {
        "a": a.value,
        "b": b.value if b else "",
        "a_bias": a.bias or "",
        "b_bias": (b and b.bias) or "",
        "before": "",
    }
    behind = index.only_reader(result)
    if behind is not None and index.is_plain(behind, "Concat"):
        concat = index.nodes[behind]
        rank = len(index.shape(result))
        if (
            len(concat.input) == 2
            and concat.input[1] == result
            and index.attribute(behind, "axis", 0) in (-1, rank - 1)
        ):
            before = index.shape(concat.input[0])
            if before and before[-1] % VECTOR == 0:
                given["before"], result = concat.input[0], concat.output[0]
                places.add(behind)
    inputs = [given[name] for name in ACTIVATION_INPUTS]
    while not inputs[-1]:
        inputs.pop()
    name = f"{result}/{op_type}"
    if element == onnx.TensorProto.BFLOAT16:
        op_type += BFLOAT16
    first = {"channels": channels, "a": a.first, "b": b.first if b else 0}
    return Fused(onnx.helper.make_node(op_type, inputs, [result], name, domain=DOMAIN, **first), frozenset(places))
