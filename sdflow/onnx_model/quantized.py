"""Detect from a graph itself whether it is quantized, and to what type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from sdflow.onnx_model.facts import packed_bits, stored_dtype, subgraphs

OPERATORS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "DynamicQuantizeLinear"),
                *("QuantizeLinear", "DequantizeLinear", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention"),
                *("QGemm", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearSigmoid", "QLinearSoftmax", "QMoE"),
                *("DynamicQuantizeLSTM", "QEmbedLayerNormalization", "Int8MatMul"),
            ),
            "int8",
        ),
        **dict.fromkeys(("MatMulNBits", "GatherBlockQuantized", "MatMulBnb4"), "int4"),
    }
)
"""Operator -> the type it computes on."""

ELEMENT_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("int8", "uint8"), "int8"),
        **dict.fromkeys(("int4", "uint4"), "int4"),
        **dict.fromkeys(("float8e4m3fn", "float8e4m3fnuz"), "float8_e4m3"),
        **dict.fromkeys(("float8e5m2", "float8e5m2fnuz"), "float8_e5m2"),
        "float4e2m1": "float4",
    }
)
"""Element type of an initializer -> quantized type."""


def quantized_to(operators: Collection[str], dtypes: Collection[str]) -> str | None:
    """Return the type that a graph is quantized to (the one with the fewest bits), or None if it is in floating point
    throughout. Stored types take precedence over computed ones. operators: of its nodes. dtypes: of its initializers,
    as in `graph_facts`."""
    stored = [ELEMENT_TYPES[name] for name in dtypes if name in ELEMENT_TYPES]
    found = stored or [OPERATORS[name] for name in operators if name in OPERATORS]
    return min(found, key=lambda kind: (bits_of(kind), kind)) if found else None


def bits_of(kind: str) -> int:
    """Return the number of bits of a type like "int4" or "float8_e4m3"."""
    return int("".join(filter(str.isdigit, kind.partition("_")[0])) or 32)


def quantized_graph(model: Any) -> str | None:
    """Like `quantized_to`, for a ModelProto; weights are not read."""
    graphs = list(subgraphs(model.graph))
    operators = {node.op_type for graph in graphs for node in graph.node}
    dtypes = {
        stored_dtype(tensor, packed)
        for graph in graphs
        for packed in (packed_bits(graph),)
        for tensor in graph.initializer
    }
    return quantized_to(sorted(operators), sorted(dtypes))
