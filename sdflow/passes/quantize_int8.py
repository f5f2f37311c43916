"""QuantizeInt8: the products with weights of a graph for the CPU in int8.

    MatMul(x, w) (+ bias)
        MatMulIntegerToFloat(DynamicQuantizeLinear(x), w in int8, its scales, bias)

Weights are signed, with a scale for each output channel; inputs are uint8, with a scale and a zero point for the whole tensor
that are found as it comes, so that no images are needed to calibrate. It is what `onnxruntime.quantization.quantize_dynamic`
computes, in the form that ONNX Runtime's optimizer turns that into (dynamic_quantize_matmul_fusion.cc), with one
DynamicQuantizeLinear for all products that read the same value. The scale of an input is that of its whole batch: an image is
not the same, bit for bit, beside others as alone.

Convolutions stay float32: in int8 they take 2.5 times as long on a CPU (benchmarks/tried.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from sdflow.passes.base import PassConfig
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.quantizing import QuantizeConfig, QuantizingPass

CONTRIB = "com.microsoft"


class QuantizeInt8Config(QuantizeConfig):
    """quantize_dynamic's options that matter here, and those of every pass that quantizes."""

    reduce_range: bool = Field(
        default=False,
        description="weights from -64 to 64, for processors without VNNI, where sums of two larger products are cut",
    )


@dataclass(frozen=True)
class _Layer:
    """A product of a value and a weight. transposed: the weight is (out, in). bias: an initializer, or ""."""

    node: Any
    weight: str
    transposed: bool = False
    bias: str = ""

    @property
    def name(self) -> str:
        return str(self.node.name)


class QuantizeInt8(QuantizingPass[QuantizeInt8Config, _Layer]):
    """Products with weights in int8, their inputs quantized as they come: CPU, the last pass of a chain in float32."""

    name: ClassVar[str] = "QuantizeInt8"
    version: ClassVar[int] = 1
    domain: ClassVar[str] = CONTRIB
    moves_weights: ClassVar[bool] = True
    quantizes: ClassVar[str | None] = "int8"
    Config: ClassVar[type[PassConfig]] = QuantizeInt8Config

    def layers(self, edit: GraphEdit, config: QuantizeInt8Config) -> list[_Layer]:
        return [layer for node in edit.graph.node if (layer := _layer(edit, node)) is not None]

    def quantize(self, edit: GraphEdit, layers: Sequence[_Layer], config: QuantizeInt8Config) -> None:
        quantize_int8(edit, layers, reduced=config.reduce_range)


def _layer(edit: GraphEdit, node: Any) -> _Layer | None:
    """The node as a layer; None for what is none that int8 takes."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = edit.weights.get(node.input[1])
    if weight is None or len(weight.dims) != 2 or not _is_float32(weight) or node.input[0] in edit.weights:
        return None
    if node.op_type == "MatMul":
        return _Layer(node, weight.name)
    options = {item.name: item for item in node.attribute}
    factors = [options[name].f for name in ("alpha", "beta") if name in options]
    if any(factor != 1 for factor in factors) or ("transA" in options and options["transA"].i):
        return None
    transposed = bool("transB" in options and options["transB"].i)
    bias = node.input[2] if len(node.input) > 2 else ""
    channels = weight.dims[0 if transposed else 1]
    if bias and (bias not in edit.weights or list(edit.weights[bias].dims) != [channels]):
        return None
    return _Layer(node, weight.name, transposed, bias)


def _is_float32(tensor: Any) -> bool:
    import onnx

    return bool(tensor.data_type == onnx.TensorProto.FLOAT)


def quantize_int8(edit: GraphEdit, layers: Sequence[_Layer], *, reduced: bool) -> None:
    """Rewrite these layers of a graph."""
    from onnx import helper

    kind = "int8_reduced" if reduced else "int8"
    inputs: dict[str, tuple[str, str, str]] = {}
    for layer in layers:
        node, source = layer.node, layer.node.input[0]
        before = []
        if source not in inputs:
            inputs[source] = (f"{source}/uint8", f"{source}/uint8/scale", f"{source}/uint8/zero")
            name = f"{source}/DynamicQuantizeLinear"
            before.append(helper.make_node("DynamicQuantizeLinear", [source], [*inputs[source]], name))
        weight = layer.weight
        if layer.transposed:
            weight = edit.moved(weight, f"{weight}/transposed", lambda values: values.transpose(1, 0))
        values, scales = edit.quantized(weight, kind, 1)
        given, scale, zero = inputs[source]
        result, bias, follows = node.output[0], layer.bias, None
        if not bias:
            result, bias, follows = _with_bias(edit, result, edit.weights[values].dims[1])
        product = helper.make_node(
            "MatMulIntegerToFloat", [given, values, scale, scales, zero, "", *([bias] if bias else [])], [result],
            node.name, domain=CONTRIB,
        )  # fmt: skip
        edit.insert_before(node, [*before, product])
        for old in (node, follows):
            if old is not None:
                edit.graph.node.remove(old)
        edit.refresh()


def _with_bias(edit: GraphEdit, result: str, channels: int) -> tuple[str, str, Any]:
    """The output of an Add behind a product, the bias that it adds, and the Add; or the result as it is."""
    add = edit.only_reader(result)
    if add is None or add.op_type != "Add" or add.domain not in ("", "ai.onnx"):
        return result, "", None
    other = next((name for name in add.input if name != result), "")
    tensor = edit.weights.get(other)
    if tensor is None or list(tensor.dims) != [channels] or not _is_float32(tensor):
        return result, "", None
    return add.output[0], other, add
