"""Rewrites the graph of any target so that ONNX Runtime's CPU provider computes what the target computes.

A GPU stores float16 or bfloat16, accumulates in float32 and rounds each operator's result to 16 bits once. So does the lowered
graph: every operator with such operands reads them as float32, computes in float32, and has its result cast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from sdflow.errors import PassError, VerificationError
from sdflow.onnx_model import nodes as onnx_nodes
from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL
from sdflow.verify.lowering import activation, attention, blockwise, convolution, float8, integer, normalization
from sdflow.verify.lowering.builder import BFLOAT16, COPY, FLOAT, HALVES, Builder, Node
from sdflow.verify.lowering.types import Types

CONTRIB = "com.microsoft"

OPERATORS: Mapping[str, Callable[[Builder, Node], list[str]]] = MappingProxyType(
    {
        "Attention": attention.attention,
        "BiasAdd": activation.bias_add,
        "BiasGelu": activation.bias_gelu,
        "BiasSplitGelu": activation.bias_split_gelu,
        "FastGelu": activation.fast_gelu,
        FLOAT8_MATMUL: float8.float8_matmul,
        "Gelu": activation.gelu,
        "GroupNorm": normalization.group_norm,
        "MatMulIntegerToFloat": integer.matmul_integer_to_float,
        "MatMulNBits": blockwise.matmul_nbits,
        "MultiHeadAttention": attention.multi_head_attention,
        "NhwcConv": convolution.nhwc_conv,
        "QuickGelu": activation.quick_gelu,
        "SimplifiedLayerNormalization": normalization.simplified_layer_normalization,
        "SkipGroupNorm": normalization.skip_group_norm,
        "SkipLayerNormalization": normalization.skip_layer_normalization,
        "SkipSimplifiedLayerNormalization": normalization.skip_simplified_layer_normalization,
    }
)
"""The operators of com.microsoft and of sdflow that can be lowered: each gives its outputs, in float32."""

DOMAINS: Mapping[str, str] = MappingProxyType({FLOAT8_MATMUL: DOMAIN, "SimplifiedLayerNormalization": ""})
"""The domains of those that are not of com.microsoft. ONNX Runtime has put one of its own into the standard domain."""

MOVES = frozenset({
    "Cast", "CastLike", "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Expand", "Flatten", "Gather",
    "GatherElements", "GatherND", "Identity", "Pad", "Reshape", "ScatterElements", "ScatterND", "Shape", "Size", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that compute nothing: 16-bit values go through them as they are."""

TURNS = frozenset({"ArgMax", "Cos", "Sin"})
"""Operators that turn a small error of what they read into another result."""

OLDEST_OPSET = 13

GIVEN = "given-with-the-session"
"""Where the external data of an initializer is said to lie whose values come with the session."""


@dataclass(frozen=True)
class Lowered:
    """A graph of standard operators that computes what the artifact computes.

    model: the ModelProto; weights stay external, as they were. Its inputs are the artifact's.
    operators: contrib operator type -> how many were lowered.
    node_of: name of each value that a node of `model` puts out -> the artifact's node that it comes from ("" for
    float32 copies of inputs and weights).
    values: name of each value that a node of the artifact puts out -> its element type in `model` (onnx.TensorProto).
    """

    model: Any
    operators: Mapping[str, int]
    node_of: Mapping[str, str]
    values: Mapping[str, int]

    @property
    def types(self) -> dict[str, int]:
        """Value -> element type, of every value that may pass from one session to another: those of `values`, and their float32
        copies."""
        copies = {name: FLOAT for name, node in self.node_of.items() if name not in self.values and name.endswith(COPY)}
        return {**copies, **self.values}


def lower(
    model: Any,
    *,
    round_fp16: bool = True,
    expose: Collection[str] = (),
    exact: Collection[str] = (),
    angles: bool = False,
) -> Lowered:
    """Lower an onnx.ModelProto, whose weights may be external and are not read. `model` is not changed.

    round_fp16: results are rounded to 16 bits where the artifact has these; without, everything that had 16 bits is float32, the
    outputs too. expose: values of the artifact that the lowered graph has as further outputs. exact: 16-bit initializers and
    inputs that it has in float32: their values are to be given. angles: what Sin, Cos and ArgMax are computed from is rounded as
    in the artifact in any case: a rounded angle or index is another one.
    Raises VerificationError, naming the node, for an operator that is not known or is used in a way that is not.
    """
    import onnx

    opset = {entry.domain: entry.version for entry in model.opset_import}.get("", 0)
    if opset < OLDEST_OPSET:
        raise VerificationError(
            f"the model has operator set {opset}, lowering needs {OLDEST_OPSET} or newer",
            remedy="Set target_opset of OnnxConversion.",
        )
    types = Types(model, opset)
    builder = Builder({**types.element_types(), **dict.fromkeys(exact, FLOAT)}, types.shapes(), round_fp16=round_fp16)
    rounded = before_angles(model.graph.node) if angles else frozenset()
    lowered: Counter[str] = Counter()
    values: list[str] = []
    for proto in in_order(model.graph.node):
        node = Node(builder, proto, proto.name or next(name for name in proto.output if name))
        builder.begin(node.name)
        builder.round_fp16 = round_fp16 or proto.output[0] in rounded
        if proto.op_type in OPERATORS and proto.domain == DOMAINS.get(proto.op_type, CONTRIB):
            _replace(builder, node, types)
            lowered[proto.op_type] += 1
        elif proto.domain in ("", "ai.onnx"):
            _keep(builder, node, types)
        else:
            raise node.error(f"domain {proto.domain}: the lowering does not know this operator")
        values += [name for name in proto.output if name]
        for name in proto.output:
            builder.node_of[name] = node.name

    unknown = sorted(set(expose) - set(values))
    if unknown:
        raise VerificationError(f"no node of the model puts out {', '.join(map(repr, unknown[:5]))}")
    outputs = [item.name for item in model.graph.output]
    unmade = [name for name in outputs if name not in builder.types]
    if unmade:
        raise VerificationError(f"no node of the model puts out {', '.join(map(repr, unmade[:5]))}, which it promises")
    result = onnx.ModelProto(ir_version=model.ir_version)
    result.opset_import.add(domain="", version=opset)
    graph = result.graph
    graph.name = model.graph.name
    graph.node.extend(builder.nodes)
    used = {name for node in builder.nodes for name in node.input} | set(outputs)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in used)
    for tensor in graph.initializer:
        if tensor.name in exact:
            tensor.CopyFrom(_to_be_given(tensor))
        elif tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN:
            tensor.data_type = onnx.TensorProto.UINT8  # the lowering reads it as bytes
    graph.initializer.extend(builder.constants)
    graph.input.extend(model.graph.input)
    for item in graph.input:
        if item.name in exact:
            item.type.tensor_type.elem_type = FLOAT
    for item in model.graph.output:
        graph.output.add().CopyFrom(item)
        graph.output[-1].type.tensor_type.elem_type = builder.types[item.name]
    for name in expose:
        if name not in outputs:
            graph.output.append(onnx.helper.make_tensor_value_info(name, builder.types[name], None))
    return Lowered(
        result,
        MappingProxyType(dict(sorted(lowered.items()))),
        MappingProxyType({name: node for name, node in builder.node_of.items() if name}),
        MappingProxyType({name: builder.types[name] for name in values}),
    )


def _to_be_given(tensor: Any) -> Any:
    """An initializer in float32 whose values come with the session."""
    import onnx

    given = onnx.TensorProto(name=tensor.name, data_type=FLOAT, dims=tensor.dims)
    given.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", GIVEN), ("offset", "0"), ("length", str(4 * prod(tensor.dims)))):
        given.external_data.add(key=key, value=value)
    return given


def before_angles(nodes: Sequence[Any]) -> frozenset[str]:
    """Every value that Sin, Cos or ArgMax is computed from. Of a value whose shape alone counts, no rounding shows."""
    producer = {name: node for node in nodes for name in node.output if name}
    found: set[str] = set()
    waiting = [name for node in nodes if node.op_type in TURNS for name in node.input]
    while waiting:
        name = waiting.pop()
        if name in producer and name not in found:
            found.add(name)
            waiting += producer[name].input if producer[name].op_type != "Shape" else ()
    return frozenset(found)


def in_order(nodes: Sequence[Any]) -> list[Any]:
    """As of `sdflow.onnx_model.nodes`. Raises VerificationError for a cycle."""
    try:
        return onnx_nodes.in_order(nodes)
    except PassError as error:
        raise VerificationError(f"the graph has a cycle: {error.what}") from error


def _replace(builder: Builder, node: Node, types: Types) -> None:
    """Lower a contrib operator. Its outputs have the element type of its first input, or as `Types` knows better."""
    results = OPERATORS[node.proto.op_type](builder, node)
    types.infer_contrib(node.proto)
    if len(node.proto.output) > len(results):
        raise node.error(f"only {len(results)} outputs are known to the lowering")
    for name, value in zip(node.proto.output, results, strict=False):
        if name:
            builder.result(value, name, types.element_type(name))
            builder.shapes.update(types.shape(name))


def _keep(builder: Builder, node: Node, types: Types) -> None:
    """Take a standard operator over; where there are 16 bits, with float32 operands and a rounded result."""
    proto = node.proto
    if any(item.HasField("g") or item.graphs for item in proto.attribute):
        raise node.error("control flow is not known to the lowering")
    types.infer(proto, node.name)
    read = {types.element_type(name) for name in proto.input if name}.intersection(HALVES)
    for name in proto.output:
        if name:
            builder.shapes.update(types.shape(name))
            builder.types[name] = types.element_type(name)
    element = builder.types.get(proto.output[0], 0)
    if not builder.round_fp16 and proto.op_type in ("Cast", "CastLike") and element in HALVES:
        builder.result(builder.op("Cast", node.input(0), to=FLOAT), proto.output[0], element)
        return
    # Moved as float32: the CPU provider has few kernels for bfloat16.
    moves = proto.op_type in MOVES and (BFLOAT16 not in read or proto.op_type == "Cast")
    if not read or (builder.round_fp16 and moves):
        builder.nodes.append(proto)
        return
    inputs = [builder.wide(name) if name else "" for name in proto.input]
    half = {name: builder.types[name] for name in proto.output if builder.types.get(name) in HALVES}
    outputs = [f"{name}/float32_result" if name in half else name for name in proto.output]
    builder.add(proto.op_type, inputs, outputs, domain=proto.domain, **node.attributes)
    for name, element in half.items():
        builder.result(f"{name}/float32_result", name, element)
