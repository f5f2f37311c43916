"""Replace Int8MatMul by sdflow's run-time operators for int8 products, or by ONNX operators.

In the artifact, Int8MatMul quantizes its input row by row and multiplies. In a session, these are separate, and products
that read the same value share its rows:

    Int8MatMul(x, weight, scales, bias)
        Int8Product(Int8Rows(x), weight, scales, bias)                    with the suffix Bfloat16 in bfloat16

Where sdflow's kernels are unavailable, ONNX Runtime's MatMulInteger multiplies, between operators that quantize.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

from sdflow.errors import SdflowError, SlowerWarning, TargetUnavailableError
from sdflow.onnx_model.float8 import DOMAIN
from sdflow.onnx_model.int8 import reads_int8, rotation_of
from sdflow.onnx_model.nodes import import_domain, refill
from sdflow.runtime.kernels.library import build
from sdflow.runtime.kernels.parts import INT8

LARGEST, SMALLEST_SCALE = 127.0, 2.0**-126


@functools.cache
def int8_library(device: int = 0, *, on_cuda: bool = True) -> Path | None:
    """Return the kernel library of a GPU, which is the current one, after testing its int8 part there, once per process.
    None, after a warning, if it is unavailable. on_cuda: whether the session runs on CUDA."""
    try:
        if not on_cuda:
            raise TargetUnavailableError("those are for CUDA")
        return build([INT8], device)
    except (SdflowError, OSError) as error:
        warnings.warn(
            f"int8 products run in ONNX Runtime's operators, which are slower than sdflow's kernels: {error}",
            SlowerWarning,
            stacklevel=3,
        )
        return None


def with_int8(model: Any) -> Any:
    """Return a copy of a ModelProto with sdflow's operators in place of each Int8MatMul."""
    from onnx import TensorProto, helper

    result, types = _copied(model)
    rows: dict[tuple[str, int], list[str]] = {}
    made: list[Any] = []
    for node in result.graph.node:
        if not reads_int8(node):
            made.append(node)
            continue
        source, rotation = node.input[0], rotation_of(node)
        ending = "Bfloat16" if _element_type(node, types) == TensorProto.BFLOAT16 else ""
        if (source, rotation) not in rows:
            name = f"{source}/int8{f'/rotated_{rotation}' if rotation else ''}"
            rows[source, rotation] = [name, f"{name}/scales"]
            outputs = rows[source, rotation]
            made.append(
                helper.make_node(f"Int8Rows{ending}", [source], outputs, name, domain=DOMAIN, rotation=rotation)
            )
        inputs = [*rows[source, rotation], *node.input[1:]]
        product = helper.make_node(f"Int8Product{ending}", inputs, [*node.output], node.name, domain=DOMAIN, kernel=0)
        made.append(product)
    return _with_nodes(result, made)


def with_definition(model: Any) -> Any:
    """Return a copy of a ModelProto with ONNX operators in place of each Int8MatMul, for providers without sdflow's
    kernels.

    The weight is MatMulInteger's first operand, and the rows are transposed: transposing the weight would copy it.
    """
    result, types = _copied(model)
    definition = _Definition(result.graph, types, _opset(model))
    made: list[Any] = []
    for node in result.graph.node:
        made += definition.nodes_for(node) if reads_int8(node) else [node]
    return _with_nodes(result, made)


class _Definition:
    """Writes Int8MatMul in ONNX operators. Products that read the same value share its rows."""

    def __init__(self, graph: Any, types: dict[str, int], opset: int) -> None:
        self._graph, self._types, self._opset = graph, types, opset
        self._rows: dict[tuple[str, int], tuple[str, str, str]] = {}
        self._constants: set[str] = set()
        self._made: list[Any] = []

    def nodes_for(self, node: Any) -> list[Any]:
        """Return the nodes that compute what an Int8MatMul does."""
        from onnx import TensorProto

        self._made = []
        weight, scales, bias = node.input[1], node.input[2], "".join(node.input[3:])
        element = _element_type(node, self._types)
        quantized, scale, shape = self._quantized(node.input[0], rotation_of(node))
        name = f"{node.output[0]}/int8"
        columns = self._add("Transpose", f"{name}/columns", quantized, perm=[1, 0])
        sums = self._add("MatMulInteger", f"{name}/sums", weight, columns)
        turned = self._add("Transpose", f"{name}/turned", sums, perm=[1, 0])
        product = self._add("Cast", f"{name}/product", turned, to=TensorProto.FLOAT)
        product = self._add("Mul", f"{name}/by_row", product, scale)
        product = self._add("Mul", f"{name}/by_column", product, scales)
        if bias:
            wide = self._add("Cast", f"{name}/bias", bias, to=TensorProto.FLOAT)
            product = self._add("Add", f"{name}/with_bias", product, wide)
        product = self._add("Cast", f"{name}/rounded", product, to=element)
        leading = self._add("Slice", f"{name}/leading", shape, self._ints(0), self._ints(-1))
        whole = self._add("Concat", f"{name}/shape", leading, self._ints(-1), axis=0)
        self._add("Reshape", node.output[0], product, whole)
        return self._made

    def _quantized(self, source: str, rotation: int) -> tuple[str, str, str]:
        """Return the names of the rows (M, K), their scales (M, 1) and the value's shape."""
        from onnx import TensorProto

        if (source, rotation) in self._rows:
            return self._rows[source, rotation]
        name = f"{source}/int8_{rotation}"
        shape = self._add("Shape", f"{name}/shape", source)
        wide = self._add("Cast", f"{name}/float32", source, to=TensorProto.FLOAT)
        if rotation:
            from sdflow.weights.hadamard import matrix

            groups = self._add("Reshape", f"{name}/groups", wide, self._ints(-1, rotation))
            turn = self._constant(f"int8/hadamard_{rotation}", matrix(rotation))
            wide = self._add("MatMul", f"{name}/rotated", groups, turn)
        width = self._add("Slice", f"{name}/width", shape, self._ints(-1), self._ints(1 << 62))
        flat = self._add("Concat", f"{name}/flat", self._ints(-1), width, axis=0)
        rows = self._add("Reshape", f"{name}/rows", wide, flat)
        size = self._add("Abs", f"{name}/size", rows)
        if self._opset < 18:
            largest = self._add("ReduceMax", f"{name}/largest", size, axes=[1], keepdims=1)
        else:
            largest = self._add("ReduceMax", f"{name}/largest", size, self._ints(1), keepdims=1)
        scale = self._add("Div", f"{name}/scale", largest, self._float("largest", LARGEST))
        nothing = self._add("Less", f"{name}/nothing", scale, self._float("smallest", SMALLEST_SCALE))
        one = self._float("one", 1.0)
        scale = self._add("Where", f"{name}/scales", nothing, one, scale)
        up = self._add("Div", f"{name}/up", self._float("largest", LARGEST), largest)
        up = self._add("Where", f"{name}/ups", nothing, one, up)
        rounded = self._add("Round", f"{name}/rounded", self._add("Mul", f"{name}/scaled", rows, up))
        self._rows[source, rotation] = self._add("Cast", name, rounded, to=TensorProto.INT8), scale, shape
        return self._rows[source, rotation]

    def _add(self, op_type: str, result: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        self._made.append(helper.make_node(op_type, [*inputs], [result], f"{result}/{op_type}", **attributes))
        return result

    def _ints(self, *values: int) -> str:
        import numpy as np

        return self._constant(f"int8/ints_{'_'.join(map(str, values))}", np.array(values, np.int64))

    def _float(self, name: str, value: float) -> str:
        import numpy as np

        return self._constant(f"int8/{name}", np.array(value, np.float32))

    def _constant(self, name: str, values: Any) -> str:
        from onnx import numpy_helper

        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(numpy_helper.from_array(values, name))
        return name


def _copied(model: Any) -> tuple[Any, dict[str, int]]:
    """Return a copy of a ModelProto, and the element types of its values and weights."""
    import onnx

    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    types = {each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.value_info, *graph.output)}
    return result, types | {each.name: each.data_type for each in graph.initializer}


def _element_type(node: Any, types: dict[str, int]) -> int:
    """Return the element type of an Int8MatMul; without type information, that of the graph's 16-bit weights."""
    from onnx import TensorProto

    names = (node.input[0], node.output[0], *node.input[3:])
    known = next((types[name] for name in names if types.get(name)), 0)
    if known:
        return known
    return int(TensorProto.FLOAT16 if TensorProto.FLOAT16 in types.values() else TensorProto.BFLOAT16)


def _opset(model: Any) -> int:
    return next((int(each.version) for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)


def _with_nodes(model: Any, nodes: list[Any]) -> Any:
    refill(model.graph.node, nodes)
    import_domain(model, DOMAIN)
    return model
