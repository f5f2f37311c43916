"""QuantizeFp8: the products with large weights of a float16 graph for CUDA in float8, E4M3.

    MatMul(x, w (K, N))
        Float8MatMul(x, w in E4M3 (N, K), its scales (N))

Weights have a scale for each output channel; what they are multiplied with is quantized as it comes, with a scale for each row
(a token, a pixel), so that no images are needed to calibrate (`sdflow.onnx_model.float8`). cuBLASLt multiplies, in an operator
of ours, on GPUs of compute capability 8.9 and newer.

What stays float16: convolutions, attention, normalizations, products of two activations, those of the time embedding (a Gemm
each, once per schedule), and those of few weights: of 640 x 640 a product takes as long in float8, and what it reads longer
(benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from sdflow.artifact import MODEL_FILE, Facts
from sdflow.errors import PassError
from sdflow.onnx_model.facts import graph_facts
from sdflow.onnx_model.files import store_proto
from sdflow.onnx_model.float8 import DOMAIN, FLOAT8_MATMUL, UNIT, WIDEST
from sdflow.passes.base import EDITS_GRAPH, Pass, PassConfig, PassInputs
from sdflow.passes.graph_edit import GraphEdit
from sdflow.passes.olive import copy_companions
from sdflow.passes.quantizing import QuantizeConfig, chosen, quantized_facts

KIND = "float8_e4m3"


class QuantizeFp8Config(QuantizeConfig):
    """Which products are taken, and the options of every pass that quantizes."""

    smallest: int = Field(
        default=1 << 20, gt=0, description="values that a weight must have at least for its product to become float8"
    )


class QuantizeFp8(Pass[QuantizeFp8Config]):
    """Products in float8 (E4M3), scales found as values come: CUDA, the last pass of a chain in float16.

    Facts, besides those of the graph: `quantized`, its `layers` and those that were `kept`.
    """

    name: ClassVar[str] = "QuantizeFp8"
    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("onnx", "numpy")
    imports = EDITS_GRAPH
    moves_weights: ClassVar[bool] = True
    quantizes: ClassVar[str | None] = KIND
    Config: ClassVar[type[PassConfig]] = QuantizeFp8Config

    def run(self, inputs: PassInputs, out: Path, config: QuantizeFp8Config) -> Facts:
        """Raises PassError when there is nothing to quantize, or `keep` does not fit the graph."""
        import onnx

        if inputs.model is None:
            raise PassError("needs an ONNX model", where=self.name, remedy="Put OnnxConversion before it.")
        model = onnx.load(str(inputs.model / MODEL_FILE), load_external_data=False)
        edit = GraphEdit(model.graph, inputs.model)
        layers = [node for node in model.graph.node if _is_layer(edit, node, config.smallest)]
        names = [node.name for node in layers]
        if not layers and not _has_float16(model):
            raise PassError("the graph is not float16", where=self.name, remedy="Put OnnxFloatToFloat16 before it.")
        wanted = chosen(names, config.keep, self.name)
        quantize_fp8(edit, [node for node in layers if node.name in wanted])
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
        store_proto(model, inputs.model, out)
        copy_companions(inputs.model, out)
        return {**graph_facts(out / MODEL_FILE), **quantized_facts(names, wanted)}


def _has_float16(model: Any) -> bool:
    import onnx

    return any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)


def _is_layer(edit: GraphEdit, node: Any, smallest: int) -> bool:
    """Whether float8 takes the node: a product with a float16 weight, of at least so many values."""
    import onnx

    if node.domain not in ("", "ai.onnx") or node.op_type != "MatMul" or node.input[0] in edit.weights:
        return False
    weight = edit.weights.get(node.input[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type != onnx.TensorProto.FLOAT16:
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
    edit.clean()
