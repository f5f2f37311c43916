"""QuantizeFp8: quantize large matrix products of a float16 or bfloat16 graph for CUDA to float8 (E4M3).

    MatMul(x, w (K, N))
        Float8MatMul(x, w in E4M3 (N, K), its scales (N))

Weights have a scale per output channel. Activations are quantized at run time with a scale per row (a token or a
pixel), so no calibration data is needed (`sdflow.onnx_model.float8`). sdflow's operator runs cuBLASLt or its own
kernel, on GPUs of compute capability 8.9 and newer.

These stay in 16 bits: convolutions, attention, normalizations, products of two activations, products with one row per
image (the time embedding and all modulation by it), and small weights: a 640 x 640 product is no faster in float8, and
quantizing its input costs time (benchmarks/gpu/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from sdflow.errors import PassError
from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL, UNIT, WIDEST
from sdflow.passes.base import PassConfig
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.quantizing import QuantizeConfig, QuantizingPass
from sdflow.passes.weighted_products import of_tokens

KIND = "float8_e4m3"


class QuantizeFp8Config(QuantizeConfig):
    """Which products are quantized, and the options of all quantizing passes."""

    smallest: int = Field(default=1 << 20, gt=0, description="minimum number of values of a quantized weight")


class QuantizeFp8(QuantizingPass[QuantizeFp8Config, Any]):
    """Products in float8 (E4M3) with scales computed at run time: CUDA, the last pass of a 16-bit chain."""

    name: ClassVar[str] = "QuantizeFp8"
    version: ClassVar[int] = 2
    domain: ClassVar[str] = DOMAIN
    moves_weights: ClassVar[bool] = True
    quantizes: ClassVar[str | None] = KIND
    Config: ClassVar[type[PassConfig]] = QuantizeFp8Config

    def layers(self, edit: GraphEdit, config: QuantizeFp8Config) -> list[Any]:
        tokens = of_tokens(edit)
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


def _is_layer(edit: GraphEdit, node: Any, smallest: int) -> bool:
    """Whether the node is a product with a 16-bit weight of at least `smallest` values and suitable dimensions."""
    if node.domain not in ("", "ai.onnx") or node.op_type != "MatMul" or node.input[0] in edit.weights:
        return False
    weight = edit.weights.get(node.input[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type not in _halves():
        return False
    k, n = weight.dims
    return bool(k * n >= smallest and k % UNIT == 0 and n % UNIT == 0 and k <= WIDEST)


def quantize_fp8(edit: GraphEdit, layers: Sequence[Any]) -> None:
    """Rewrite these products of the graph."""
    for node in layers:
        turned = edit.moved(node.input[1], f"{node.input[1]}/transposed", lambda values: values.transpose(1, 0))
        values, scales = edit.quantized(turned, KIND, 0)
        node.domain, node.op_type = DOMAIN, FLOAT8_MATMUL
        node.input[:] = [node.input[0], values, scales]
    edit.refresh()
