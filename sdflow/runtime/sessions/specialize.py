"""Fix a graph's sizes and fold its shape arithmetic ahead of time.

The result has static shapes throughout and no node that ONNX Runtime's CUDA provider would place on the CPU for a
shape, so a CUDA graph can capture it. The artifact on disk is unchanged; its weights are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sdflow.errors import PassError
from sdflow.onnx_model.float8 import FLOAT8_MATMUL
from sdflow.onnx_model.int8 import INT8_MATMUL
from sdflow.onnx_model.nodes import attribute, in_order, needed, refill

FOLDED_ELEMENTS = 1 << 14
"""Larger values stay in the graph: only shapes, masks and indices are folded."""

_Shape = tuple[int, ...]


def specialize(model: Any, sizes: Mapping[str, int], outputs: Collection[str] | None = None) -> Any:
    """Return a copy of a ModelProto with its inputs' named axes fixed, and everything folded that does not depend on
    data.

    sizes: axis name -> size, for all named axes of the inputs. outputs: the wanted ones, default all. CLIP's pooled
    output, unused in Stable Diffusion 1 and 2, needs an integer ArgMax without a CUDA kernel, which prevents capturing
    the text encoder. Folded values become initializers with their own names; all values have shapes in `value_info`.
    Raises PassError for an axis without a size, a missing output, an operator of unknown output shape, or a graph that
    onnx cannot process.
    """
    import onnx
    from onnx.shape_inference import InferenceError

    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    if outputs is not None:
        if missing := sorted(set(outputs) - {item.name for item in graph.output}):
            raise PassError(f"the model has no output {missing[0]!r}", where="specialize")
        refill(graph.output, (item for item in graph.output if item.name in outputs))
    for item in graph.input:
        for axis in item.type.tensor_type.shape.dim:
            if not axis.HasField("dim_value"):
                if axis.dim_param not in sizes:
                    raise PassError(
                        f"the axis {axis.dim_param!r} of {item.name} has no size",
                        where="specialize",
                        remedy=f"Pass a size for each axis; known: {', '.join(sorted(sizes)) or 'none'}.",
                    )
                axis.dim_value = sizes[axis.dim_param]
    try:
        _Folding(result).run()
    except (InferenceError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        # onnx's exceptions for invalid graphs: excessive sizes, missing values, nodes without inputs.
        raise PassError(
            f"its shapes cannot be inferred: {type(error).__name__}: {error}",
            where="specialize",
            remedy="The graph is damaged: rebuild the pipeline with sdflow run.",
        ) from error
    return result


class _Folding:
    """One walk over the nodes in order, which computes each node if possible, or else infers its output shapes."""

    def __init__(self, model: Any) -> None:
        import onnx

        self.model, self.graph = model, model.graph
        self.schemas = onnx.defs
        self.opsets = {entry.domain: entry.version for entry in model.opset_import}
        self.types: dict[str, Any] = {item.name: item.type for item in self.graph.input}
        self.known: dict[str, Any] = {}
        self.cut: dict[str, tuple[str, int, int, int]] = {}
        """Output of a Slice -> (its source, axis, start, end)."""
        self.same: dict[str, str] = {}
        """Value reassembled from all parts of another -> that value."""
        for tensor in self.graph.initializer:
            self.types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                self.known[tensor.name] = onnx.numpy_helper.to_array(tensor)

    def run(self) -> None:
        import onnx

        initializers = {tensor.name for tensor in self.graph.initializer}
        kept = []
        outputs = {item.name for item in self.graph.output}
        for node in in_order(self.graph.node):
            for place, name in enumerate(node.input):
                node.input[place] = self.same.get(name, name)
            values = self._computed(node)
            if values is None:
                self._infer(node)
                whole = self._rejoined(node)
                if whole is not None and node.output[0] not in outputs:
                    self.same[node.output[0]] = whole
                else:
                    kept.append(node)
                continue
            for name, value in values.items():
                self.known[name] = value
                data_type = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
                self.types[name] = onnx.helper.make_tensor_type_proto(data_type, value.shape)
        outputs = {item.name for item in self.graph.output}
        nodes = needed(kept, outputs)
        read = outputs | {name for node in nodes for name in node.input}
        for name in sorted(read.intersection(self.known) - initializers):
            self.graph.initializer.append(onnx.numpy_helper.from_array(self.known[name], name))
        refill(self.graph.node, nodes)
        refill(self.graph.initializer, (tensor for tensor in self.graph.initializer if tensor.name in read))
        del self.graph.value_info[:]
        for item in self.graph.output:
            item.type.CopyFrom(self.types[item.name])
        inner = (name for node in self.graph.node for name in node.output if name)
        for name in inner:
            if name not in outputs:
                self.graph.value_info.add(name=name).type.CopyFrom(self.types[name])

    def _rejoined(self, node: Any) -> str | None:
        """Return the value whose parts this node reassembles, as FLUX.1's single blocks do with text and image, or
        None."""
        if node.domain != "":
            return None
        if node.op_type == "Slice" and all(name in self.known for name in node.input[1:] if name):
            ranges = [self.known[name].tolist() for name in node.input[1:] if name]
            if len(node.input) > 3 and node.input[3] and all(len(each) == 1 for each in ranges):
                (start,), (end,), (axis,), *steps = ranges
                shape = self._shape(node.input[0])
                begin, stop, step = slice(start, end, steps[0][0] if steps else 1).indices(shape[axis])
                if step == 1:
                    self.cut[node.output[0]] = node.input[0], axis % len(shape), begin, stop
            return None
        if node.op_type != "Concat" or not all(name in self.cut for name in node.input):
            return None
        parts = [self.cut[name] for name in node.input]
        (whole, axis, *_), shape = parts[0], self._shape(node.output[0])
        if any(part[:2] != (whole, axis) for part in parts) or node.attribute[0].i % len(shape) != axis:
            return None
        places = [0, *(part[3] for part in parts)]
        in_turn = [part[2] for part in parts] == places[:-1]
        return whole if in_turn and self._shape(whole) == shape else None

    def _computed(self, node: Any) -> dict[str, Any] | None:
        """Return the values of a node's outputs, or None if they depend on data or are large."""
        import numpy as np
        import onnx
        from onnx.reference import ReferenceEvaluator

        if node.op_type == "Constant" and [each.name for each in node.attribute] == ["value"]:  # a third of all nodes
            value = onnx.numpy_helper.to_array(node.attribute[0].t)
            return {node.output[0]: value} if value.size <= FOLDED_ELEMENTS else None
        if node.op_type == "Shape" and node.domain == "":
            shape = self._shape(node.input[0])
            start, end = (attribute(node, key, None) for key in ("start", "end"))
            return {node.output[0]: np.array(shape[start:end], np.int64)}
        if node.domain != "" or any(name and name not in self.known for name in node.input):
            return None
        feeds = {name: self.known[name] for name in node.input if name}
        self._infer(node)
        if any(math.prod(self._shape(name)) > FOLDED_ELEMENTS for name in node.output if name):
            return None
        results = ReferenceEvaluator(node).run(None, feeds)
        return {name: np.asarray(value) for name, value in zip(node.output, results, strict=False) if name}

    def _shape(self, name: str) -> _Shape:
        return tuple(axis.dim_value for axis in self.types[name].tensor_type.shape.dim)

    def _infer(self, node: Any) -> None:
        import onnx

        if onnx.defs.has(node.op_type, self.opsets.get(node.domain, 1), node.domain):
            inferred = self._infer_standard(node)
        elif node.op_type in CONTRIB_SHAPES:
            shapes = CONTRIB_SHAPES[node.op_type](node, [self._shape(name) if name else () for name in node.input])
            element = self.types[node.input[TYPED_BY.get(node.op_type, 0)]].tensor_type.elem_type
            types = (onnx.helper.make_tensor_type_proto(element, shape) for shape in shapes)
            inferred = dict(zip(node.output, types, strict=False))
        else:
            inferred = {}
        for name in node.output:
            if name and not _is_static(inferred.get(name)):
                raise PassError(
                    f"the shape of output {name!r} of {node.op_type} {node.name!r} is not known",
                    where="specialize",
                    remedy="Add the operator to CONTRIB_SHAPES in sdflow/runtime/sessions/specialize.py.",
                )
            if name:
                self.types[name] = inferred[name]

    def _infer_standard(self, node: Any) -> dict[str, Any]:
        import onnx

        version = self.opsets.get(node.domain, 1)
        schema = self.schemas.get_schema(node.op_type, version, node.domain)
        names = [name for name in node.input if name]
        data = {name: onnx.numpy_helper.from_array(self.known[name]) for name in names if name in self.known}
        opsets = list(self.model.opset_import)
        types = {name: self.types[name] for name in names}
        return dict(
            onnx.shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=opsets, ir_version=self.model.ir_version
            )
        )


def _is_static(value: Any) -> bool:
    if value is None or not value.tensor_type.HasField("shape"):
        return False
    return all(axis.HasField("dim_value") for axis in value.tensor_type.shape.dim)


_Rule = Callable[[Any, Sequence[_Shape]], Sequence[_Shape]]


def _same(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    return [inputs[0]] * len(node.output)


def _half_of_last(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    return [(*inputs[0][:-1], inputs[0][-1] // 2)]


def _nhwc_conv(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    """Input (N, H, W, C), weight (M, kH, kW, C): as for Conv, with another axis order."""
    image, kernel = inputs[0], inputs[1]
    pads = attribute(node, "pads", [0, 0, 0, 0])
    strides, dilations = attribute(node, "strides", [1, 1]), attribute(node, "dilations", [1, 1])
    rows = [
        (image[1 + i] + pads[i] + pads[i + 2] - dilations[i] * (kernel[1 + i] - 1) - 1) // strides[i] + 1
        for i in (0, 1)
    ]
    return [(image[0], *rows, kernel[0])]


def _multi_head_attention(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    """Query (B, S, hidden), or packed with key and value as (B, S, heads, 3, size); see ContribOperators.md."""
    query = inputs[0]
    if len(query) == 5:
        return [(query[0], query[1], query[2] * query[4])]
    value = inputs[2] if len(inputs) > 2 else ()
    if len(value) == 4:  # (B, heads, L, size)
        return [(query[0], query[1], value[1] * value[3])]
    return [(query[0], query[1], value[2] if value else query[2])]


def _attention(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    """Input (B, S, C), weights (C, 3 x hidden)."""
    sizes = attribute(node, "qkv_hidden_sizes", None)
    hidden = sizes[2] if sizes else inputs[1][1] // 3
    return [(*inputs[0][:2], hidden)]


def _product(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    """x (..., K), weight (N, K)."""
    return [(*inputs[0][:-1], inputs[1][0])]


def _integer_product(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    """x (..., K), weight (K, N)."""
    return [(*inputs[0][:-1], inputs[1][1])]


def _packed_product(node: Any, inputs: Sequence[_Shape]) -> Sequence[_Shape]:
    """x (..., K), weight packed."""
    return [(*inputs[0][:-1], attribute(node, "N", 0))]


CONTRIB_SHAPES: Mapping[str, _Rule] = {
    "Attention": _attention,
    "BiasAdd": _same,
    "BiasGelu": _same,
    "BiasSplitGelu": _half_of_last,
    "FastGelu": _same,
    FLOAT8_MATMUL: _product,
    "Gelu": _same,
    "GroupNorm": _same,
    INT8_MATMUL: _product,
    "LayerNormalization": _same,
    "MatMulIntegerToFloat": _integer_product,
    "MatMulNBits": _packed_product,
    "MultiHeadAttention": _multi_head_attention,
    "NhwcConv": _nhwc_conv,
    "QuickGelu": _same,
    "SimplifiedLayerNormalization": _same,
    "SkipGroupNorm": _same,
    "SkipLayerNormalization": _same,
    "SkipSimplifiedLayerNormalization": _same,
}
"""Output shapes of operators of com.microsoft and sdflow, and of LayerNormalization, which is standard from opset 17 on
and which ONNX Runtime's fusions insert at any opset. Optional outputs of norms (means, deviations) are never used."""

TYPED_BY: Mapping[str, int] = {"MatMulIntegerToFloat": 2, "SimplifiedLayerNormalization": 1}
"""For operators whose output type differs from their first input's: the input that has the output's type."""
