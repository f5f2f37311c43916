"""Element types and shapes of every value of a graph, node by node, from ONNX's own shape inference."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from sdflow.errors import VerificationError

SMALL = 64
"""Constants of up to this many elements are passed to shape inference: shapes, axes, sizes."""

OUTPUT_RANK = {"MultiHeadAttention": 3, "Attention": 3}

TYPED_BY = {"MatMulIntegerToFloat": 2, "SimplifiedLayerNormalization": 1}
"""Contrib operators whose outputs have the element type of an input other than the first: the scale."""


class Types:
    """The types of `model`'s values known so far. Weights are not read."""

    def __init__(self, model: Any, opset: int) -> None:
        import onnx

        self._opset = opset
        self._declared = {item.name: item.type for item in (*model.graph.value_info, *model.graph.output)}
        self._types: dict[str, Any] = {item.name: item.type for item in model.graph.input}
        self._data: dict[str, Any] = {}
        for tensor in model.graph.initializer:
            self._types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            self._remember(tensor.name, tensor)

    def element_types(self) -> dict[str, int]:
        return {name: self.element_type(name) for name in self._types}

    def element_type(self, name: str) -> int:
        """onnx.TensorProto's number; 0 for a value that is not a tensor."""
        return int(self._types[name].tensor_type.elem_type) if name in self._types else 0

    def shapes(self) -> dict[str, Sequence[int | str | None]]:
        return {key: dims for name in self._types for key, dims in self.shape(name).items()}

    def shape(self, name: str) -> dict[str, Sequence[int | str | None]]:
        """{name: dimensions}, each a number, a symbol or None; {} if not even their number is known."""
        for known in (self._types.get(name), self._declared.get(name)):
            if known is not None and known.tensor_type.HasField("shape"):
                return {name: [_dimension(item) for item in known.tensor_type.shape.dim]}
        return {}

    def infer(self, node: Any, node_name: str) -> None:
        """Infer the outputs of a standard operator. Raises VerificationError if ONNX does not know it or rejects it."""
        import onnx

        if node.op_type == "Constant":
            for item in node.attribute:
                if item.name == "value":
                    self._remember(node.output[0], item.t)
        try:
            outputs = onnx.shape_inference.infer_node_outputs(
                self._op_schema(node.op_type),
                node,
                {name: self._types[name] for name in node.input if name},
                {name: self._data[name] for name in node.input if name in self._data},
                opset_imports=[onnx.helper.make_opsetid("", self._opset)],
            )
        except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError, KeyError) as error:
            raise VerificationError(f"{node.op_type}: {error}", where=f"node {node_name}") from error
        self._types.update(outputs)

    def infer_contrib(self, node: Any) -> None:
        """Outputs of a contrib operator: element type of the first input (or of `TYPED_BY`'s), and the same number of
        dimensions, or the declared one."""
        import onnx

        typed = self._types[node.input[TYPED_BY.get(node.op_type, 0)]]
        dims = self.shape(node.input[0]).get(node.input[0])
        rank = OUTPUT_RANK.get(node.op_type, None if dims is None else len(dims))
        shape = None if rank is None else [None] * rank
        for name in node.output:
            if name:
                self._types[name] = onnx.helper.make_tensor_type_proto(typed.tensor_type.elem_type, shape)

    def _op_schema(self, op_type: str) -> Any:
        import onnx

        if op_type == "LayerNormalization":  # ONNX Runtime has had it in the standard domain since before opset 17.
            return onnx.defs.get_schema(op_type, max(self._opset, 17), "")
        return onnx.defs.get_schema(op_type, self._opset, "")

    def _remember(self, name: str, tensor: Any) -> None:
        import onnx

        if prod(tensor.dims) <= SMALL and tensor.data_location != onnx.TensorProto.EXTERNAL:
            self._data[name] = tensor


def _dimension(item: Any) -> int | str | None:
    kind = item.WhichOneof("value")
    return None if kind is None else getattr(item, kind)
