"""QuantizeInt4: quantize the weights of matrix products to 4 (or 8) bits.

    MatMul(x, w (K, N))
        MatMulNBits(x, w in 4 bits (N, blocks, bytes), scales (N, blocks), zeros)

Weights have a scale and a zero point per block along K (`sdflow.weights.blockwise`). x is not quantized, so no
calibration data is needed. ONNX Runtime has the operator on CPU, CUDA, DirectML and WebGPU; MIGraphX only accepts 4
bits with one-dimensional zero points, and these are two-dimensional. Scales have the type of the product's activations.

Embeddings, convolutions and products of two activations are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from sdflow.passes.base import PassConfig
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.quantizing import QuantizeConfig, QuantizingPass
from sdflow.passes.weighted_products import WeightedProduct, weighted_product

CONTRIB = "com.microsoft"


class QuantizeInt4Config(QuantizeConfig):
    """How weights are stored, which ones, and the options of all quantizing passes."""

    bits: Literal[4, 8] = Field(default=4, description="bits per weight")
    block_size: Literal[16, 32, 64, 128, 256] = Field(
        default=32, description="weights per scale; products whose inner size is not a multiple of it are unchanged"
    )
    is_symmetric: bool = Field(default=False, description="no zero points: smaller but less accurate")
    algorithm: Literal["mse", "rtn"] = Field(
        default="mse",
        description="how scales are chosen: least squared error of the weights, or their range (as Olive does)",
    )
    accuracy_level: Literal[0, 1, 2, 3, 4] = Field(
        default=0,
        description="as in MatMulNBits. 0: compute in the activations' type; 4: the CPU may round these to int8",
    )
    smallest: int = Field(default=1 << 16, gt=0, description="minimum number of values of a quantized weight")


class QuantizeInt4(QuantizingPass[QuantizeInt4Config, WeightedProduct]):
    """Weights in 4 or 8 bits by blocks, activations unchanged: the last pass of a chain."""

    name: ClassVar[str] = "QuantizeInt4"
    version: ClassVar[int] = 1
    domain: ClassVar[str] = CONTRIB
    moves_weights: ClassVar[bool] = True
    quantizes: ClassVar[str | None] = "int4"
    Config: ClassVar[type[PassConfig]] = QuantizeInt4Config

    @classmethod
    def quantizes_to(cls, config: Mapping[str, Any]) -> str | None:
        return f"int{config.get('bits', 4)}"

    def layers(self, edit: GraphEdit, config: QuantizeInt4Config) -> list[WeightedProduct]:
        found = [weighted_product(edit, node) for node in edit.graph.node]
        return [layer for layer in found if layer is not None and _fits(edit, layer, config)]

    def quantize(self, edit: GraphEdit, layers: Sequence[WeightedProduct], config: QuantizeInt4Config) -> None:
        edit.replace_nodes([(layer.node, _quantized(edit, layer, config)) for layer in layers])


def _fits(edit: GraphEdit, layer: WeightedProduct, config: QuantizeInt4Config) -> bool:
    inner, outer = layer.sizes(edit)
    return inner * outer >= config.smallest and inner % config.block_size == 0


def _quantized(edit: GraphEdit, layer: WeightedProduct, config: QuantizeInt4Config) -> list[Any]:
    """Return the nodes that compute the layer with a quantized weight."""
    from onnx import helper

    from sdflow.weights.blockwise import Format

    node, weight = layer.node, layer.weight
    if not layer.transposed:
        weight = edit.moved(weight, f"{weight}/transposed", lambda values: values.transpose(1, 0))
    tensor = edit.weights[weight]
    how = Format(config.bits, config.block_size, config.is_symmetric, config.algorithm, layer.dtype)
    values, scales, zeros = edit.blockwise(weight, how)
    rows, columns = tensor.dims
    options = {"K": columns, "N": rows, "bits": config.bits, "block_size": config.block_size}
    if config.accuracy_level:
        options["accuracy_level"] = config.accuracy_level
    result = node.output[0]
    product = helper.make_node(
        "MatMulNBits",
        [node.input[0], values, scales, *([] if config.is_symmetric else [zeros])],
        [f"{result}/product" if layer.bias else result],
        node.name,
        domain=CONTRIB,
        **options,
    )
    if not layer.bias:
        return [product]
    return [product, helper.make_node("Add", [product.output[0], layer.bias], [result], f"{node.name}/bias")]
