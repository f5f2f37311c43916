"""Products of an activation and a weight (MatMul and Gemm), for passes that quantize them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdflow.onnx_model.nodes import in_order
from sdflow.passes.graph_edit import GraphEdit


@dataclass(frozen=True)
class WeightedProduct:
    """A product of an activation and a two-dimensional weight.

    transposed: the weight is (out, in), otherwise (in, out). bias: the value added to the product, or "".
    dtype: the weight's: "float32", "float16" or "bfloat16".
    """

    node: Any
    weight: str
    dtype: str
    transposed: bool = False
    bias: str = ""

    @property
    def name(self) -> str:
        """Name of the product's node."""
        return str(self.node.name)

    def sizes(self, edit: GraphEdit) -> tuple[int, int]:
        """Return the weight's input and output channels."""
        rows, columns = edit.weights[self.weight].dims
        return (columns, rows) if self.transposed else (rows, columns)


def weighted_product(edit: GraphEdit, node: Any) -> WeightedProduct | None:
    """Return the node as a product with a weight, or None. A Gemm that scales or transposes its input is not one."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm") or node.input[0] in edit.weights:
        return None
    weight = edit.weights.get(node.input[1])
    if weight is None or len(weight.dims) != 2 or weight.data_type not in _dtypes():
        return None
    dtype = _dtypes()[weight.data_type]
    if node.op_type == "MatMul":
        return WeightedProduct(node, weight.name, dtype)
    options = {item.name: item for item in node.attribute}
    factors = [options[name].f for name in ("alpha", "beta") if name in options]
    if any(factor != 1 for factor in factors) or ("transA" in options and options["transA"].i):
        return None
    transposed = bool("transB" in options and options["transB"].i)
    return WeightedProduct(node, weight.name, dtype, transposed, "".join(node.input[2:]))


def of_tokens(edit: GraphEdit) -> set[str]:
    """Return the values that depend on images or text. All others depend only on timesteps and pooled embeddings, and
    have one row per image."""
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


def _dtypes() -> Mapping[int, str]:
    import onnx

    kinds = onnx.TensorProto
    return {int(kinds.FLOAT): "float32", int(kinds.FLOAT16): "float16", int(kinds.BFLOAT16): "bfloat16"}
