"""QuantizeInt8: quantize matrix products to int8, for the CPU, DirectML and CUDA.

    MatMul(x, w) (+ bias)
        MatMulIntegerToFloat(DynamicQuantizeLinear(x), w in int8, its scales, bias)

Weights are signed, with a scale per output channel. Inputs are uint8, with a scale and zero point per tensor that are
computed at run time, so no calibration data is needed. The result equals `onnxruntime.quantization.quantize_dynamic`
after ONNX Runtime's optimizer (dynamic_quantize_matmul_fusion.cc), with one DynamicQuantizeLinear for all products that
read the same value. Activation scales are per batch, so an image's exact bits depend on what it is batched with.

In a float16 graph, for DirectML, the quantized product lies between two casts: DynamicQuantizeLinear only takes
float32.

With `rotation`, inputs and weights are multiplied by a Hadamard matrix before quantization, in groups of that size: the
weights when they are bound, the inputs at run time. This spreads outliers, which would otherwise leave few quantization
levels for all other values (https://arxiv.org/abs/2404.00456).

With `activations: row`, for CUDA, a 16-bit graph gets sdflow's operator (`sdflow.onnx_model.int8`), whose kernels
quantize, rotate, scale and add the bias:

    MatMul(x, w (K, N)) (+ bias)
        Int8MatMul(x, w in int8 (N, K), its scales (N), bias)

Products with one row per image (the time embedding and all modulation by it) stay in 16 bits then.

Convolutions stay float32: int8 makes them 2.5 times slower on a CPU (benchmarks/tried.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from sdflow.errors import PassError
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.int8 import INT8_MATMUL, UNIT_IN, UNIT_OUT, WIDEST
from sdflow.passes.base import PassConfig
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.quantizing import QuantizeConfig, QuantizingPass
from sdflow.passes.weighted_products import WeightedProduct, of_tokens, weighted_product

CONTRIB = "com.microsoft"
LATER_OPTIONS = {"smallest": 0, "activations": "tensor"}
"""Options that did not exist at first, and their defaults."""


class QuantizeInt8Config(QuantizeConfig):
    """The relevant options of quantize_dynamic, and the options of all quantizing passes."""

    reduce_range: bool = Field(
        default=False,
        description="limit weights to -64..64, for CPUs without VNNI, where the sum of two larger products saturates",
    )
    rotation: Literal[16, 32, 64, 128, 256] | None = Field(
        default=None,
        description="size of the Hadamard matrix that rotates inputs and weights before quantization; products whose "
        "inner size is not a multiple of it are not rotated",
    )
    smallest: int = Field(default=0, ge=0, description="minimum number of values of a quantized weight")
    activations: Literal["tensor", "row"] = Field(
        default="tensor",
        description="tensor: uint8 with one scale per value, in ONNX Runtime's operators (CPU, DirectML); row: int8 with a "
        "scale per row, in sdflow's kernels (CUDA, float16 or bfloat16)",
    )

    @model_serializer(mode="wrap")
    def _without_later_options(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit later options if they have their defaults, to keep the cache keys from before they existed."""
        found: dict[str, Any] = handler(self)
        return {name: value for name, value in found.items() if (name, value) not in LATER_OPTIONS.items()}


class QuantizeInt8(QuantizingPass[QuantizeInt8Config, WeightedProduct]):
    """Products in int8, with inputs quantized at run time: CPU, DirectML and CUDA, the last pass of a chain."""

    name: ClassVar[str] = "QuantizeInt8"
    version: ClassVar[int] = 2
    domain: ClassVar[str] = CONTRIB
    moves_weights: ClassVar[bool] = True
    quantizes: ClassVar[str | None] = "int8"
    Config: ClassVar[type[PassConfig]] = QuantizeInt8Config

    def domain_for(self, config: QuantizeInt8Config) -> str:
        return DOMAIN if config.activations == "row" else self.domain

    def layers(self, edit: GraphEdit, config: QuantizeInt8Config) -> list[WeightedProduct]:
        found = [layer for node in edit.graph.node if (layer := weighted_product(edit, node)) is not None]
        found = [layer for layer in found if prod(layer.sizes(edit)) >= config.smallest]
        if config.activations == "row":
            if found and all(layer.dtype == "float32" for layer in found):
                raise PassError(
                    "the graph is neither float16 nor bfloat16",
                    where=self.name,
                    remedy="Put OnnxFloatToFloat16 before it.",
                )
            tokens = of_tokens(edit)
            return [layer for layer in found if layer.node.input[0] in tokens and _fits_rows(edit, layer)]
        fitting = [layer for layer in found if _fits(edit, layer)]
        if not fitting and any(layer.dtype == "bfloat16" for layer in found):
            raise PassError(
                "the graph is in bfloat16, which int8 supports with scales per row only",
                where=self.name,
                remedy="Set activations: row (CUDA).",
            )
        return fitting

    def quantize(self, edit: GraphEdit, layers: Sequence[WeightedProduct], config: QuantizeInt8Config) -> None:
        make = quantize_rows if config.activations == "row" else quantize_int8
        make(edit, layers, reduced=config.reduce_range, rotation=config.rotation or 0)


def _fits(edit: GraphEdit, layer: WeightedProduct) -> bool:
    """Whether int8 supports the product: a bias must be an initializer with one value per output channel."""
    if layer.dtype == "bfloat16":
        return False
    if not layer.bias:
        return True
    return layer.bias in edit.weights and list(edit.weights[layer.bias].dims) == [layer.sizes(edit)[1]]


def _fits_rows(edit: GraphEdit, layer: WeightedProduct) -> bool:
    """Whether Int8MatMul supports the product."""
    inner, outer = layer.sizes(edit)
    sizes = inner % UNIT_IN == 0 and inner <= WIDEST and outer % UNIT_OUT == 0
    bias = not layer.bias or (layer.bias in edit.weights and list(edit.weights[layer.bias].dims) == [outer])
    return layer.dtype != "float32" and sizes and bias


def quantize_rows(edit: GraphEdit, layers: Sequence[WeightedProduct], *, reduced: bool, rotation: int = 0) -> None:
    """Replace these layers of the graph by Int8MatMul. rotation: size of the Hadamard matrix, 0 for none."""
    from onnx import helper

    kind = "int8_reduced" if reduced else "int8"
    changed: list[tuple[Any, Sequence[Any]]] = []
    for layer in layers:
        node, weight, result, bias = layer.node, layer.weight, layer.node.output[0], layer.bias
        inner, outer = layer.sizes(edit)
        if not layer.transposed:
            weight = edit.moved(weight, f"{weight}/transposed", lambda values: values.transpose(1, 0))
        rotates = rotation > 0 and inner % rotation == 0
        values, scales = edit.quantized(edit.rotated(weight, 1, rotation) if rotates else weight, kind, 0)
        if not bias:
            result, bias, add = _with_bias(edit, result, outer, edit.weights[layer.weight].data_type)
            changed += [] if add is None else [(add, ())]
        inputs = [node.input[0], values, scales, *([bias] if bias else [])]
        attributes = {"rotation": rotation} if rotates else {}
        made = helper.make_node(INT8_MATMUL, inputs, [result], node.name, domain=DOMAIN, **attributes)
        changed.append((node, [made]))
    edit.replace_nodes(changed)


def quantize_int8(edit: GraphEdit, layers: Sequence[WeightedProduct], *, reduced: bool, rotation: int = 0) -> None:
    """Rewrite these layers of the graph. rotation: size of the Hadamard matrix, 0 for none."""
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
            before = before[1:] if half and known else before  # already cast
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
            result, bias, add = _with_bias(edit, result, outer, TensorProto.FLOAT)
            changed += [] if add is None else [(add, ())]
        product = helper.make_node(
            "MatMulIntegerToFloat", [given, values, scale, scales, zero, "", *([bias] if bias else [])], [result],
            node.name, domain=CONTRIB,
        )  # fmt: skip
        changed.append((node, [*before, product, *after]))
    edit.replace_nodes(changed)


def _quantized_input(edit: GraphEdit, source: str, half: bool, rotation: int) -> tuple[list[Any], tuple[str, str, str]]:
    """Return the nodes that quantize a value (..., inner), and the names of the quantized value, its scale and zero
    point."""
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


def _with_bias(edit: GraphEdit, result: str, channels: int, element: int) -> tuple[str, str, Any]:
    """Return the output of an Add behind a product, its bias of this element type, and the Add; or (result, "", None)."""
    add = edit.only_reader(result)
    if add is None or add.op_type != "Add" or add.domain not in ("", "ai.onnx"):
        return result, "", None
    other = next((name for name in add.input if name != result), "")
    tensor = edit.weights.get(other)
    if tensor is None or list(tensor.dims) != [channels] or tensor.data_type != element:
        return result, "", None
    return add.output[0], other, add
