"""Rewrite the graph of any target so that ONNX Runtime's CPU provider computes what the target computes.

A GPU stores float16 or bfloat16, accumulates in float32 and rounds each operator's result to 16 bits once. So does the
lowered graph: every operator with 16-bit operands reads them as float32, computes in float32, and casts its result.
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
from sdflow.onnx_model.int8 import INT8_MATMUL
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
        INT8_MATMUL: integer.int8_matmul,
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
"""The operators of com.microsoft and of sdflow that can be lowered; each function returns the outputs, in float32."""

DOMAINS: Mapping[str, str] = MappingProxyType(
    {FLOAT8_MATMUL: DOMAIN, INT8_MATMUL: DOMAIN, "SimplifiedLayerNormalization": ""}
)
"""Domains of operators outside com.microsoft. ONNX Runtime has put one of its own into the standard domain."""

MOVES = frozenset({
    "Cast", "CastLike", "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Expand", "Flatten", "Gather",
    "GatherElements", "GatherND", "Identity", "Pad", "Reshape", "ScatterElements", "ScatterND", "Shape", "Size", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that only move values: 16-bit values pass unchanged."""

TURNS = frozenset({"ArgMax", "Cos", "Sin"})
"""Operators for which a small error of the input changes the result."""

OLDEST_OPSET = 13

GIVEN = "given-with-the-session"
"""Placeholder location of an initializer whose values are supplied with the session."""


@dataclass(frozen=True)
class Lowered:
    """A graph of standard operators that computes what the artifact computes.

    model: the ModelProto; weights stay external, unchanged. Its inputs are the artifact's.
    operators: contrib operator type -> number lowered.
    node_of: each value that a node of `model` outputs -> its node in the artifact ("" for float32 copies of inputs and
    weights).
    values: each value that a node of the artifact outputs -> its element type in `model` (onnx.TensorProto).
    """

    model: Any
    operators: Mapping[str, int]
    node_of: Mapping[str, str]
    values: Mapping[str, int]

    @property
    def types(self) -> dict[str, int]:
        """Value -> element type, for every value that may pass between sessions: those of `values`, and their float32
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
    """Lower an onnx.ModelProto, without changing it or reading its weights, which may be external.

    round_fp16: round results to 16 bits where the artifact has them; otherwise all 16-bit values become float32,
    including outputs. expose: values of the artifact to add as outputs. exact: 16-bit initializers and inputs to turn
    into float32; the caller supplies their values. angles: round the inputs of Sin, Cos and ArgMax as in the artifact
    in any case, since a rounded angle or index is a different one.
    Raises VerificationError, naming the node, for an unsupported operator or use of one.
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
            raise node.error(f"domain {proto.domain}: the lowering does not support this operator")
        values += [name for name in proto.output if name]
        for name in proto.output:
            builder.node_of[name] = node.name

    unknown = sorted(set(expose) - set(values))
    if unknown:
        raise VerificationError(f"no node of the model outputs {', '.join(map(repr, unknown[:5]))}")
    outputs = [item.name for item in model.graph.output]
    unmade = [name for name in outputs if name not in builder.types]
    if unmade:
        raise VerificationError(f"no node of the model outputs {', '.join(map(repr, unmade[:5]))}, which it promises")
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
    """A float32 initializer whose values are supplied with the session."""
    import onnx

    given = onnx.TensorProto(name=tensor.name, data_type=FLOAT, dims=tensor.dims)
    given.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", GIVEN), ("offset", "0"), ("length", str(4 * prod(tensor.dims)))):
        given.external_data.add(key=key, value=value)
    return given


def before_angles(nodes: Sequence[Any]) -> frozenset[str]:
    """Every value that Sin, Cos or ArgMax depends on, other than through its shape alone."""
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
    """See `sdflow.onnx_model.nodes`. Raises VerificationError for a cycle."""
    try:
        return onnx_nodes.in_order(nodes)
    except PassError as error:
        raise VerificationError(f"the graph has a cycle: {error.what}") from error


def _replace(builder: Builder, node: Node, types: Types) -> None:
    """Lower a contrib operator. Outputs have the element type of its first input, unless `Types` knows better."""
    results = OPERATORS[node.proto.op_type](builder, node)
    types.infer_contrib(node.proto)
    if len(node.proto.output) > len(results):
        raise node.error(f"only {len(results)} outputs are supported by the lowering")
    for name, value in zip(node.proto.output, results, strict=False):
        if name:
            builder.result(value, name, types.element_type(name))
            builder.shapes.update(types.shape(name))


def _keep(builder: Builder, node: Node, types: Types) -> None:
    """Keep a standard operator; with 16-bit values, give it float32 operands and round its result."""
    proto = node.proto
    if any(item.HasField("g") or item.graphs for item in proto.attribute):
        raise node.error("control flow is not supported by the lowering")
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
