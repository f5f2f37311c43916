"""QuantizeFp8: the products with large weights of a float16 or bfloat16 graph for CUDA in float8, E4M3.

    MatMul(x, w (K, N))
        Float8MatMul(x, w in E4M3 (N, K), its scales (N))

Weights have a scale for each output channel; what they are multiplied with is quantized as it comes, with a scale for each row
(a token, a pixel), so that no images are needed to calibrate (`sdflow.onnx_model.float8`). cuBLASLt multiplies, in an operator
of ours, on GPUs of compute capability 8.9 and newer, or a kernel of ours.

What stays in 16 bits: convolutions, attention, normalizations, products of two activations, those with one row for an image (the
time embedding, and all that is modulated with it), and those of few weights: of 640 x 640 a product takes as long in float8, and
what it reads longer (benchmarks/gpu/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from sdflow.errors import PassError
from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL, UNIT, WIDEST
from sdflow.onnx_model.nodes import in_order
from sdflow.passes.base import PassConfig
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.quantizing import QuantizeConfig, QuantizingPass

KIND = "float8_e4m3"


class QuantizeFp8Config(QuantizeConfig):
    """Which products are taken, and the options of every pass that quantizes."""

    smallest: int = Field(
        default=1 << 20, gt=0, description="values that a weight must have at least for its product to become float8"
    )


class QuantizeFp8(QuantizingPass[QuantizeFp8Config, Any]):
    """Products in float8 (E4M3), scales found as values come: CUDA, the last pass of a chain in 16 bits."""

    name: ClassVar[str] = "QuantizeFp8"
    version: ClassVar[int] = 2
    domain: ClassVar[str] = DOMAIN
    moves_weights: ClassVar[bool] = True
    quantizes: ClassVar[str | None] = KIND
    Config: ClassVar[type[PassConfig]] = QuantizeFp8Config

    def layers(self, edit: GraphEdit, config: QuantizeFp8Config) -> list[Any]:
        tokens = _of_tokens(edit)
        found = [node for node in edit.graph.node if _is_layer(edit, node, config.smallest) and node.input[0] in tokens]
        if not found and not any(tensor.data_type in _halves() for tensor in edit.weights.values()):
            raise PassError(
                "the graph is neither float16 nor bfloat16", where=self.name, remedy="Put OnnxFloatToFloat16 before it."
            )
        return found

    def quantize(self, edit: GraphEdit, layers: Sequence[Any], config: QuantizeFp8Config) -> None:
        quantize_fp8(edit, layers)


def _halves() -> tuple[int, ...]:
    import onnx

    return onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16


def _of_tokens(edit: GraphEdit) -> set[str]:
    """The values that depend on images or texts; the others, which depend on timesteps and pooled embeddings alone, have one
    row for an image."""
    import onnx

    found = set()
    for item in edit.graph.input:
        axes, element = len(item.type.tensor_type.shape.dim), item.type.tensor_type.elem_type
        if axes > 2 or (axes == 2 and element in (onnx.TensorProto.INT32, onnx.TensorProto.INT64)):
            found.add(item.name)
    for node in in_order(edit.graph.node):
        if node.op_type not in ("Shape", "Size") and not found.isdisjoint(node.input):
            found.update(node.output)
    return found


def _is_layer(edit: GraphEdit, node: Any, smallest: int) -> bool:
    """Whether float8 takes the node: a product with a weight in 16 bits, of at least so many values."""
    if node.domain not in ("", "ai.onnx") or node.op_type != "MatMul" or node.input[0] in edit.weights:
        return False
    weight = edit.weights.get(node.input[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type not in _halves():
        return False
    k, n = weight.dims
    return bool(k * n >= smallest and k % UNIT == 0 and n % UNIT == 0 and k <= WIDEST)


def quantize_fp8(edit: GraphEdit, layers: Sequence[Any]) -> None:
    """Rewrite these products of a graph."""
    for node in layers:
        turned = edit.moved(node.input[1], f"{node.input[1]}/transposed", lambda values: values.transpose(1, 0))
        values, scales = edit.quantized(turned, KIND, 0)
        node.domain, node.op_type = DOMAIN, FLOAT8_MATMUL
        node.input[:] = [node.input[0], values, scales]
    edit.refresh()
