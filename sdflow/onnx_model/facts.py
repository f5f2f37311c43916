"""Properties of an ONNX model that do not need its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sdflow.onnx_model.reading import load_graph
from sdflow.onnx_model.stub import is_stub


def graph_facts(model_path: Path) -> dict[str, Any]:
    """Counts of the model file `model_path`; external data is sized, not read.

    nodes: number of nodes, those of subgraphs included.
    operators: operator type -> count, standard and contrib operators alike.
    dtypes: element type of initializers ("float16") -> {"count": tensors, "bytes": bytes}; "uint4" of bytes that hold two.
    opset: version of the standard operator set.
    bytes: size of the graph file and of the external data that it names.
    """

    model = load_graph(model_path)
    operators: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {}
    locations: set[str] = set()
    for graph in subgraphs(model.graph):
        operators.update(node.op_type for node in graph.node)
        packed = packed_bits(graph)
        for tensor in graph.initializer:
            sizes = dtypes.setdefault(stored_dtype(tensor, packed), Counter())
            sizes.update(count=1, bytes=tensor_bytes(tensor))
            if not is_stub(tensor):
                locations.update(entry.value for entry in tensor.external_data if entry.key == "location")
    folder = model_path.parent
    return {
        "nodes": operators.total(),
        "operators": dict(sorted(operators.items())),
        "dtypes": {name: dict(sizes) for name, sizes in sorted(dtypes.items())},
        "opset": next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0),
        "bytes": model_path.stat().st_size + sum((folder / name).stat().st_size for name in locations),
    }


def packed_bits(graph: Any) -> dict[str, int]:
    """Return initializer -> bits per value, for the weights and zero points that MatMulNBits reads packed in bytes."""
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            bits = next((item.i for item in node.attribute if item.name == "bits"), 4)
            found |= {name: int(bits) for index in (1, 3) for name in node.input[index : index + 1] if name}
    return found


def stored_dtype(tensor: Any, packed: Mapping[str, int]) -> str:
    """Return the name of an initializer's element type; "uint4" if its bytes hold two values. packed: from
    `packed_bits`."""
    name, bits = dtype_name(tensor.data_type), packed.get(tensor.name, 8)
    return name if name != "uint8" or bits == 8 else f"uint{bits}"


def subgraphs(graph: Any) -> Iterator[Any]:
    """Yield `graph` and all graphs in attributes of its nodes (If, Loop, Scan)."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from subgraphs(inner)


def tensor_bytes(tensor: Any) -> int:
    """Return the size of a TensorProto's values as raw data in bytes, wherever stored. Strings count as 0."""
    import onnx

    if tensor.data_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return 0
    values: int = math.prod(tensor.dims)
    if dtype_name(tensor.data_type) in ("int4", "uint4", "float4e2m1"):
        return (values + 1) // 2
    return values * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def precision_of(graph: Any) -> str:
    """ "bfloat16" or "float16" where a weight of the graph has that type, else "float32"."""
    import onnx

    kinds = {tensor.data_type for tensor in graph.initializer}
    if onnx.TensorProto.BFLOAT16 in kinds:
        return "bfloat16"
    return "float16" if onnx.TensorProto.FLOAT16 in kinds else "float32"


def dtype_name(data_type: int) -> str:
    """Return numpy's and torch's name ("float32", "int64", "bfloat16") of an ONNX element type."""
    import onnx

    name = str(onnx.TensorProto.DataType.Name(data_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)
