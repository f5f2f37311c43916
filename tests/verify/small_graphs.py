"""Graphs of a few nodes, with weights that have a shape and no values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

F16, F32, F64, I32, I64, U8 = (
    TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8,
)  # fmt: skip
MS = "com.microsoft"

Axes = Sequence[int | str | None]


def weight(name: str, dims: Sequence[int], dtype: int = F16) -> TensorProto:
    """An initializer whose values nobody will look for."""
    tensor = TensorProto(name=name, data_type=dtype, dims=dims, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="nowhere")
    return tensor


def port(name: str, axes: Axes, dtype: int = F16) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, axes)


def node(op_type: str, inputs: str, outputs: str, domain: str = MS, **attributes: Any) -> NodeProto:
    """`inputs` and `outputs`: names with spaces between; `-` for one that is left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op_type, names, outputs.split(), name=f"the_{op_type}", domain=domain, **attributes)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Sequence[TensorProto] = (),
    opset: int = 17,
) -> ModelProto:
    graph = helper.make_graph(nodes, "small", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def one(
    made: NodeProto, inputs: Mapping[str, tuple[Axes, int]], out: int = F16, opset: int = 17, **dims: Any
) -> ModelProto:
    """A model of one node. inputs: name -> (axes, type); dims: weight -> (shape, type)."""
    return model(
        [made],
        [port(name, axes, dtype) for name, (axes, dtype) in inputs.items()],
        [helper.make_tensor_value_info(made.output[0], out, None)],
        [weight(name, shape, dtype) for name, (shape, dtype) in dims.items()],
        opset,
    )


def unet_block(dtype: int = F16) -> ModelProto:
    """What the CUDA fusions make of a block of SD1.5's UNet at its true widths: every fused operator of the UNet."""
    groups = {"groups": 32, "epsilon": 1e-5, "channels_last": 1}
    nodes = [
        node("NhwcConv", "x w1 c", "h1", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("GroupNorm", "h1 gamma beta", "h2", activation=1, **groups),
        node("NhwcConv", "h2 w1 c", "h3", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("SkipGroupNorm", "h3 gamma beta h1 c", "h4 s4", activation=0, **groups),
        node("Reshape", "h4 flat", "t0", domain=""),
        node("LayerNormalization", "t0 c c", "t1", domain=""),
        node("MatMul", "t1 wqkv", "qkv", domain=""),
        node("Reshape", "qkv packed", "q5", domain=""),
        node("MultiHeadAttention", "q5 - - bqkv", "a1", num_heads=8),
        node("SkipLayerNormalization", "a1 t0 c c c", "t2"),
        node("MatMul", "t2 wup", "up", domain=""),
        node("BiasSplitGelu", "up bup", "g"),
        node("MatMul", "g wdown", "down", domain=""),
        node("BiasAdd", "down c t2", "y"),
    ]
    weights = [
        weight("w1", [320, 3, 3, 320], dtype), weight("c", [320], dtype),
        weight("gamma", [320], F32), weight("beta", [320], F32),
        weight("wqkv", [320, 960], dtype), weight("bqkv", [960], dtype),
        weight("wup", [320, 2560], dtype), weight("bup", [2560], dtype), weight("wdown", [1280, 320], dtype),
        helper.make_tensor("flat", I64, [3], [2, -1, 320]), helper.make_tensor("packed", I64, [5], [2, -1, 8, 3, 40]),
    ]  # fmt: skip
    axes = ["batch", "latent_height", "latent_width", 320]
    return model(nodes, [port("x", axes, dtype)], [helper.make_tensor_value_info("y", dtype, None)], weights)
