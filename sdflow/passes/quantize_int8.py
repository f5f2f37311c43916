"""QuantizeInt8: the products with weights of a graph for the CPU in int8.

    MatMul(x, w) (+ bias)
        MatMulIntegerToFloat(DynamicQuantizeLinear(x), w in int8, its scales, bias)

Weights are signed, with a scale for each output channel; inputs are uint8, with a scale and a zero point for the whole tensor
that are found as it comes, so that no images are needed to calibrate. It is what `onnxruntime.quantization.quantize_dynamic`
computes, in the form that ONNX Runtime's optimizer turns that into (dynamic_quantize_matmul_fusion.cc), with one
DynamicQuantizeLinear for all products that read the same value. The scale of an input is that of its whole batch: an image is
not the same, bit for bit, beside others as alone.

In a graph in float16, for DirectML, a product and what quantizes its input lie between two casts: DynamicQuantizeLinear takes
float32 alone.

With `rotation`, inputs and weights are multiplied by a Hadamard matrix before they are quantized, some values at a time: the
weights when they are bound, the inputs as they come. Single large values, which would leave few numbers to all others, are spread
so (https://arxiv.org/abs/2404.00456).

Convolutions stay float32: in int8 they take 2.5 times as long on a CPU (benchmarks/tried.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from sdflow.passes.base import PassConfig
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.quantizing import QuantizeConfig, QuantizingPass
from sdflow.passes.weighted_products import WeightedProduct, weighted_product

CONTRIB = "com.microsoft"


class QuantizeInt8Config(QuantizeConfig):
    """quantize_dynamic's options that matter here, and those of every pass that quantizes."""

    reduce_range: bool = Field(
        default=False,
        description="weights from -64 to 64, for processors without VNNI, where sums of two larger products are cut",
    )
    rotation: Literal[16, 32, 64, 128, 256] | None = Field(
        default=None,
        description="inputs and weights are rotated by a Hadamard matrix of this size before they are quantized; products whose "
        "inner size is no multiple of it are not",
    )


class QuantizeInt8(QuantizingPass[QuantizeInt8Config, WeightedProduct]):
    """Products with weights in int8, their inputs quantized as they come: CPU and DirectML, the last pass of a chain."""

    name: ClassVar[str] = "QuantizeInt8"
    version: ClassVar[int] = 2
    domain: ClassVar[str] = CONTRIB
    moves_weights: ClassVar[bool] = True
    quantizes: ClassVar[str | None] = "int8"
    Config: ClassVar[type[PassConfig]] = QuantizeInt8Config

    def layers(self, edit: GraphEdit, config: QuantizeInt8Config) -> list[WeightedProduct]:
        found = [weighted_product(edit, node) for node in edit.graph.node]
        return [layer for layer in found if layer is not None and _fits(edit, layer)]

    def quantize(self, edit: GraphEdit, layers: Sequence[WeightedProduct], config: QuantizeInt8Config) -> None:
        quantize_int8(edit, layers, reduced=config.reduce_range, rotation=config.rotation or 0)


def _fits(edit: GraphEdit, layer: WeightedProduct) -> bool:
    """Whether int8 takes the product: a bias must be an initializer with a value for each output channel."""
    if layer.dtype == "bfloat16":
        return False
    if not layer.bias:
        return True
    return layer.bias in edit.weights and list(edit.weights[layer.bias].dims) == [layer.sizes(edit)[1]]


def quantize_int8(edit: GraphEdit, layers: Sequence[WeightedProduct], *, reduced: bool, rotation: int = 0) -> None:
    """Rewrite these layers of a graph. rotation: the size of the Hadamard matrix, 0 without."""
    from onnx import TensorProto, helper

    kind = "int8_reduced" if reduced else "int8"
    inputs: dict[tuple[str, bool], tuple[str, str, str]] = {}
    changed: list[tuple[Any, Sequence[Any]]] = []
    for layer in layers:
        node, source = layer.node, layer.node.input[0]
        half = layer.dtype == "float16"
        weight = layer.weight
        if layer.transposed:
            weight = edit.moved(weight, f"{weight}/transposed", lambda values: values.transpose(1, 0))
        inner, outer = edit.weights[weight].dims
        rotates = rotation > 0 and inner % rotation == 0
        before: list[Any] = []
        if (source, rotates) not in inputs:
            known = (source, not rotates) in inputs
            before, inputs[source, rotates] = _quantized_input(edit, source, half, rotation if rotates else 0)
            before = before[1:] if half and known else before  # the cast is there
        values, scales = edit.quantized(edit.rotated(weight, 0, rotation) if rotates else weight, kind, 1)
        given, scale, zero = inputs[source, rotates]
        result, bias = node.output[0], layer.bias
        after: list[Any] = []
        if half:
            cast = f"{result}/product" if bias else result
            after.append(
                helper.make_node("Cast", [f"{result}/float32"], [cast], f"{node.name}/half", to=TensorProto.FLOAT16)
            )
            if bias:
                after.append(helper.make_node("Add", [cast, bias], [result], f"{node.name}/bias"))
            result, bias = f"{result}/float32", ""
        elif not bias:
            result, bias, add = _with_bias(edit, result, outer)
            changed += [] if add is None else [(add, ())]
        product = helper.make_node(
            "MatMulIntegerToFloat", [given, values, scale, scales, zero, "", *([bias] if bias else [])], [result],
            node.name, domain=CONTRIB,
        )  # fmt: skip
        changed.append((node, [*before, product, *after]))
    edit.replace_nodes(changed)


def _quantized_input(edit: GraphEdit, source: str, half: bool, rotation: int) -> tuple[list[Any], tuple[str, str, str]]:
    """What quantizes a value (..., inner), and the names of its numbers, their scale and their zero."""
    from onnx import TensorProto, helper

    now = source
    nodes: list[Any] = []

    def add(op_type: str, what: str, *others: str, **attributes: Any) -> None:
        nonlocal now
        result = f"{source}/{what}"
        nodes.append(helper.make_node(op_type, [now, *others], [result], f"{result}/{op_type}", **attributes))
        now = result

    if half:
        add("Cast", "float32", to=TensorProto.FLOAT)
    if rotation:
        import numpy as np

        from sdflow.weights.hadamard import matrix

        shape = f"{source}/shape"
        nodes.append(helper.make_node("Shape", [source], [shape], f"{shape}/Shape"))
        add("Reshape", "groups", edit.constant(f"hadamard_{rotation}/groups", np.array([-1, rotation], np.int64)))
        add("MatMul", "turned", edit.constant(f"hadamard_{rotation}", matrix(rotation)))
        add("Reshape", "rotated", shape)
    names = (f"{now}/uint8", f"{now}/uint8/scale", f"{now}/uint8/zero")
    nodes.append(helper.make_node("DynamicQuantizeLinear", [now], [*names], f"{now}/DynamicQuantizeLinear"))
    return nodes, names


def _with_bias(edit: GraphEdit, result: str, channels: int) -> tuple[str, str, Any]:
    """The output of an Add behind a product, the bias that it adds, and the Add; or the result as it is."""
    from onnx import TensorProto

    add = edit.only_reader(result)
    if add is None or add.op_type != "Add" or add.domain not in ("", "ai.onnx"):
        return result, "", None
    other = next((name for name in add.input if name != result), "")
    tensor = edit.weights.get(other)
    if tensor is None or list(tensor.dims) != [channels] or tensor.data_type != TensorProto.FLOAT:
        return result, "", None
    return add.output[0], other, add
