"""Replace Float8MatMul by sdflow's run-time operators for float8 products.

In the artifact, Float8MatMul quantizes its input row by row and multiplies. In a session, these are separate: products
that read the same value share its rows, and a gated GELU or layer normalization that only products read outputs float8
rows directly.

    Float8MatMul(x, weight, scales)
        Float8Product(Float8Rows(x), weight, scales)                      with the suffix Bfloat16 in bfloat16
        Float8Product(Float8SplitGelu(x, bias), weight, scales)             for BiasSplitGelu
        Float8Product(Float8LayerNorm(x, skip, ...), weight, scales)        for SkipLayerNormalization

On Hopper, a product that only a gated GELU reads is fused with it:

    BiasSplitGelu(Float8MatMul(x, weight, scales), bias)
        Float8GatedProduct(Float8Rows(x), weight, scales, bias)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdflow.errors import SdflowError, TargetUnavailableError
from sdflow.onnx_model.float8 import DOMAIN, reads_float8
from sdflow.onnx_model.nodes import attribute, import_domain, refill
from sdflow.runtime.kernels.hopper import FLOAT8_SINCE
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.parts import FLOAT8

WHERE = "cuda"
NEEDS = "Use a float16 or float32 pipeline, built without QuantizeFp8."


@functools.cache
def float8_library(device: int = 0) -> Path:
    """Return the kernel library of a GPU after testing its float8 part there, once per process. The GPU is the current
    one.

    Raises TargetUnavailableError, stating float8's requirements, if it is unavailable, also for lack of a kernel folder.
    """
    import torch

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(device)
        if (found.major, found.minor) < FLOAT8_SINCE:
            raise TargetUnavailableError(
                f"float8 needs a GPU of compute capability {'.'.join(map(str, FLOAT8_SINCE))} or newer; "
                f"{found.name} has {found.major}.{found.minor}",
                where=WHERE,
                remedy=NEEDS,
            )
    try:
        return build([FLOAT8], device)
    except (SdflowError, OSError) as error:
        raise TargetUnavailableError(
            f"float8 requires sdflow's own kernels: {error}", where=WHERE, remedy=NEEDS
        ) from error


def with_float8(model: Any, *, hopper: bool = False) -> Any:
    """Return a copy of a ModelProto with sdflow's operators in place of each Float8MatMul; float8 weights become bytes.

    model: with all shapes known, as from `specialize`; otherwise each product has its own Float8Rows. hopper: whether
    the GPU supports Float8GatedProduct.
    """
    import onnx

    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN:
            tensor.data_type = onnx.TensorProto.UINT8
    rows: dict[str, list[str]] = {}
    made: list[Any] = []
    fused = _Fused(graph)
    products = fused.gated() if hopper else {}
    for node in graph.node:
        if not reads_float8(node):
            gated = products.get(node.input[0]) if node.input else None
            if gated is None:
                if not fused.is_window(node):
                    made.append(fused.replaced(node, rows) or node)
                continue
            operands = [*rows[gated.input[0]], *gated.input[1:], node.input[1]]
            made.append(onnx.helper.make_node("Float8GatedProduct", operands, [*node.output], node.name, domain=DOMAIN))
            continue
        source = node.input[0]
        ending = fused.ending(node)
        if source not in rows:
            rows[source] = _rows_of(source)
            value, attributes = fused.window(source)
            rounding = f"Float8Rows{ending}", [value], rows[source], f"{source}/float8"
            made.append(onnx.helper.make_node(*rounding, domain=DOMAIN, **attributes))
        name = node.output[0]
        if name in products:
            continue
        product = f"Float8Product{ending}", [*rows[source], *node.input[1:]], [name, f"{name}/workspace"], node.name
        made.append(onnx.helper.make_node(*product, domain=DOMAIN))
    refill(graph.node, made)
    import_domain(result, DOMAIN)
    return result


def _rows_of(value: str) -> list[str]:
    return [f"{value}/float8", f"{value}/float8/scales"]


class _Fused:
    """Analysis of which nodes can output float8 rows directly."""

    def __init__(self, graph: Any) -> None:
        self._types = {item.name: item.type.tensor_type for item in (*graph.input, *graph.value_info, *graph.output)}
        self._results = {item.name for item in graph.output}
        self._others = {name for node in graph.node if not reads_float8(node) for name in node.input}
        self._others |= {name for node in graph.node if reads_float8(node) for name in node.input[1:]}
        self._products = {node.input[0] for node in graph.node if reads_float8(node)}
        self._readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._made = {node.output[0]: node for node in graph.node if reads_float8(node)}
        self._weights = {tensor.data_type for tensor in graph.initializer}
        self._windows = self._found_windows(graph)

    def ending(self, product: Any) -> str:
        """Return the operators' name suffix for a product's type; without type information, for the weights' type."""
        from onnx import TensorProto

        known = {self._types[name].elem_type for name in (product.input[0], product.output[0]) if name in self._types}
        found = known or self._weights
        return "Bfloat16" if TensorProto.BFLOAT16 in found and TensorProto.FLOAT16 not in found else ""

    def is_window(self, node: Any) -> bool:
        """Whether a node is a Slice of rows that only float8 products read; Float8Rows performs it itself."""
        return node.op_type == "Slice" and node.output[0] in self._windows

    def window(self, source: str) -> tuple[str, dict[str, int]]:
        """Return the value that holds the rows of `source`, and the attributes of Float8Rows that select them."""
        value, tokens, first = self._windows.get(source, (source, 0, 0))
        return value, {"tokens": tokens, "first": first}

    def _found_windows(self, graph: Any) -> dict[str, tuple[str, int, int]]:
        """Map a Slice's result to its source, the number of rows, and the first row."""
        from onnx import TensorProto, numpy_helper

        constants = {tensor.name: tensor for tensor in graph.initializer}
        found = {}
        for node in graph.node:
            if node.op_type != "Slice" or node.domain not in ("", "ai.onnx"):
                continue
            result = node.output[0]
            shape, whole = self._shape(result), self._shape(node.input[0])
            if result not in self._products or result in self._others | self._results or not shape or not whole:
                continue
            if len(whole) != 3 or [whole[0], whole[2]] != [shape[0], shape[2]]:
                continue
            bounds = [constants.get(name) for name in node.input[1:]]
            if len(bounds) < 3 or any(each is None or each.data_location == TensorProto.EXTERNAL for each in bounds):
                continue
            starts, _, axes, *steps = (numpy_helper.to_array(each).tolist() for each in bounds)
            if axes in ([1], [-2]) and (not steps or steps[0] == [1]):
                found[result] = (node.input[0], shape[1], starts[0] if starts[0] >= 0 else max(0, starts[0] + whole[1]))
        return found

    def gated(self) -> dict[str, Any]:
        """Return result -> product for products that only a gated GELU reads."""
        found = {}
        for name, product in self._made.items():
            readers = self._readers.get(name, [])
            if name in self._results or len(readers) != 1:
                continue
            (reader,) = readers
            if (reader.domain, reader.op_type) == ("com.microsoft", "BiasSplitGelu") and reader.input[0] == name:
                found[name] = product
        return found

    def replaced(self, node: Any, rows: dict[str, list[str]]) -> Any | None:
        """Return sdflow's operator for a node, if any, and add its outputs to `rows`."""
        from onnx import helper

        value = node.output[0]
        if node.domain != "com.microsoft" or value not in self._products or value in self._others | self._results:
            return None
        if node.op_type == "BiasSplitGelu":
            rows[value] = _rows_of(value)
            return helper.make_node("Float8SplitGelu", [*node.input], rows[value], node.name, domain=DOMAIN)
        if node.op_type != "SkipLayerNormalization" or not self._is_layer_norm(node):
            return None
        rows[value] = _rows_of(value)
        outputs = [*rows[value], *(name for name in node.output[3:] if name)]
        epsilon = attribute(node, "epsilon", 1e-12)
        return helper.make_node("Float8LayerNorm", [*node.input], outputs, node.name, domain=DOMAIN, epsilon=epsilon)

    def _is_layer_norm(self, node: Any) -> bool:
        """Whether x and skip have one shape, gamma, beta and bias are present, and mean and deviation are not
        output."""
        if len(node.input) != 5 or not all(node.input) or any(node.output[1:3]):
            return False
        shapes = [self._shape(name) for name in node.input[:2]]
        return shapes[0] is not None and shapes[0] == shapes[1]

    def _shape(self, name: str) -> Sequence[int] | None:
        found = self._types.get(name)
        axes = [axis.dim_value for axis in found.shape.dim] if found is not None else []
        return axes if axes and all(axes) and len(axes) <= 4 else None
