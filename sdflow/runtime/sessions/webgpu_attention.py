"""Replace fused attention on WebGPU adapters where the provider's kernel is wrong.

From 32 rows on, with a head size that is a multiple of 4, `Attention` and `MultiHeadAttention` run a flash kernel whose
source (flash_attention.wgsl.template) treats every subgroup of up to 8 as one of 8. Adapters with subgroups of 4, such
as SwiftShader, count keys twice and read invalid lanes: values are off by a tenth or more, without an error. So the
kernel is tested once per process; if it is wrong, these nodes become products and a softmax. Details:
benchmarks/providers/webgpu_attention.md.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from sdflow.errors import SlowerWarning, VerificationError
from sdflow.machine.onnx_runtime import onnxruntime_errors
from sdflow.machine.webgpu import adapter_failure
from sdflow.onnx_model.nodes import attributes, refill
from sdflow.runtime.sessions.cannot_run import cannot_run
from sdflow.targets import WEBGPU_PROVIDER, Target

FUSED = ("Attention", "MultiHeadAttention")
CONTRIB = "com.microsoft"
TOLERANCE = 1e-3
PROBE_SIZES = {"rows": 64, "keys": 40, "heads": 2, "size": 8}
"""Of a probe; size: of a head."""

_verdicts: list[bool] = []
_trying = threading.Lock()


def with_right_attention(model: Any, ort: Any, target: Target, devices: list[Any]) -> None:
    """Replace the fused attention of a ModelProto with known shapes (`specialize`), in place, if this adapter computes
    it wrongly.
    devices: the provider's, from `sdflow.machine.plugins`.

    Raises TargetUnavailableError if there is no adapter, VerificationError for unsupported forms of attention.
    """
    if not has_fused_attention(model) or _is_right(ort, target, devices):
        return
    warnings.warn(
        f"{target.name}: this adapter computes fused attention wrongly; it runs as products and a softmax",
        SlowerWarning,
        stacklevel=3,
    )
    without_fused_attention(model)


def _is_right(ort: Any, target: Target, devices: list[Any]) -> bool:
    """Whether this adapter computes attention correctly; tested on the first call."""
    with _trying:
        if not _verdicts:
            try:
                _verdicts.append(_try(ort, devices))
            except onnxruntime_errors(ort) as error:
                raise adapter_failure(error, target) or cannot_run(WEBGPU_PROVIDER, error) from error
        return _verdicts[0]


def _try(ort: Any, devices: list[Any]) -> bool:
    import numpy as np

    rows, keys, heads, size = PROBE_SIZES.values()
    generator = np.random.default_rng(0)
    values = {
        name: generator.standard_normal((1, count, heads * size)).astype(np.float32)
        for name, count in (("q", rows), ("k", keys), ("v", keys))
    }
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_provider_for_devices(devices[:1], {})
    (found,) = ort.InferenceSession(attention_probe(), options, enable_fallback=0).run(None, values)
    q, k, v = (value[0].reshape(-1, heads, size).transpose(1, 0, 2).astype(np.float64) for value in values.values())
    scores = np.exp(q @ k.transpose(0, 2, 1) / math.sqrt(size))
    wanted = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(1, rows, heads * size)
    return bool(np.abs(found - wanted).max() < TOLERANCE)


def attention_probe() -> bytes:
    """A model of one fused attention, which tests whether a device computes it correctly: q (1, rows, width), k and v
    (1, keys, width) -> attention (1, rows, width), float32, of `PROBE_SIZES`; width: heads * size."""
    from onnx import TensorProto, helper

    rows, keys, heads, size = PROBE_SIZES.values()
    lengths = {"q": rows, "k": keys, "v": keys, "attention": rows}
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, count, heads * size])
        for name, count in lengths.items()
    ]
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["attention"], domain=CONTRIB, num_heads=heads)
    graph = helper.make_graph([node], "attention", infos[:-1], infos[-1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(deterministic=True)
    return model


def without_fused_attention(model: Any) -> None:
    """Replace the fused nodes of a ModelProto with known shapes (`specialize`), in place.

    Raises VerificationError for unsupported forms.
    """
    graph = model.graph
    made = _Made(graph)
    nodes = []
    for node in graph.node:
        if _is_fused(node):
            made.nodes = []
            _expand(node, made)
            nodes += made.nodes
        else:
            nodes.append(node)
    refill(graph.node, nodes)


def has_fused_attention(model: Any) -> bool:
    """Whether a ModelProto has nodes for such a kernel."""
    return any(_is_fused(node) for node in model.graph.node)


def _is_fused(node: Any) -> bool:
    return node.domain == CONTRIB and node.op_type in FUSED


class _Made:
    """Nodes under construction, and known shapes and types."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.nodes: list[Any] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, int] = {}
        for tensor in graph.initializer:
            self.shapes[tensor.name], self.types[tensor.name] = tuple(tensor.dims), tensor.data_type
        for item in (*graph.input, *graph.value_info):
            kind = item.type.tensor_type
            self.shapes[item.name] = tuple(axis.dim_value for axis in kind.shape.dim)
            self.types[item.name] = kind.elem_type

    def node(self, operator: str, inputs: list[str], output: str, outputs: int = 1, **attributes: Any) -> Any:
        from onnx import helper

        names = [output] if outputs == 1 else [f"{output}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, names, name=output, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, name: str) -> str:
        from onnx import numpy_helper

        self.graph.initializer.append(numpy_helper.from_array(value, name))
        return name


def _expand(node: Any, made: _Made) -> None:
    import numpy as np
    from onnx import helper

    settings = attributes(node)
    inputs = dict(enumerate(node.input))
    name, heads = node.name or node.output[0], settings["num_heads"]
    kind = made.types.get(inputs[0])
    if node.op_type == "Attention":
        q, k, v = _projected(node, inputs, settings, made, name)
        others: tuple[int, ...] = (3, 4, 6)
    else:
        q, k, v = _biased(inputs, made, name)
        others = (4, 6, 7, 8, 9)
    by_heads = len(made.shapes[k]) == len(made.shapes[v]) == 4  # k and v are (batch, heads, keys, size)
    plain = len(made.shapes[k]) == len(made.shapes[v]) == 3
    other = any(inputs.get(index) for index in others)
    if kind is None or other or len(made.shapes[q]) != 3 or not (by_heads or plain):
        raise _unknown(node)
    (batch, rows, width), keys = made.shapes[q], made.shapes[k][-2]
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    scale = settings.get("scale") or 1 / math.sqrt(width // heads)
    parts = []
    for value, letter, order in ((q, "q", (0, 2, 1, 3)), (k, "k", (0, 2, 3, 1)), (v, "v", (0, 2, 1, 3))):
        if len(made.shapes[value]) == 4:
            parts.append(
                value if letter == "v" else made.node("Transpose", [value], f"{name}_k_turned", perm=(0, 1, 3, 2))
            )
            continue
        _, count, channels = made.shapes[value]
        shape = made.constant(np.array([batch, count, heads, channels // heads], np.int64), f"{name}_{letter}_shape")
        taken = made.node("Reshape", [value, shape], f"{name}_{letter}_heads")
        parts.append(made.node("Transpose", [taken], f"{name}_{letter}_turned", perm=order))
    scaled = made.node("Mul", [parts[0], made.constant(np.array(scale, dtype), f"{name}_scale")], f"{name}_q_scaled")
    scores = made.node("MatMul", [scaled, parts[1]], f"{name}_scores")
    if added := inputs.get(5):
        scores = made.node("Add", [scores, added], f"{name}_scores_added")
    if settings.get("unidirectional"):
        future = np.triu(np.full((rows, keys), np.finfo(dtype).min / 2, dtype), 1 + keys - rows)
        scores = made.node("Add", [scores, made.constant(future, f"{name}_future")], f"{name}_scores_masked")
    weights = made.node("Softmax", [scores], f"{name}_weights", axis=-1)
    turned = made.node(
        "Transpose", [made.node("MatMul", [weights, parts[2]], f"{name}_sums")], f"{name}_back", perm=(0, 2, 1, 3)
    )
    summed = heads * made.shapes[v][3] if by_heads else made.shapes[v][2]
    flat = made.constant(np.array([batch, rows, summed], np.int64), f"{name}_shape")
    made.node("Reshape", [turned, flat], node.output[0])


def _projected(
    node: Any, inputs: Mapping[int, str], settings: Mapping[str, Any], made: _Made, name: str
) -> tuple[str, str, str]:
    """Return q, k and v of Attention, from one product with all three matrices."""
    import numpy as np

    packed = made.node("MatMul", [inputs[0], inputs[1]], f"{name}_packed")
    if inputs.get(2):
        packed = made.node("Add", [packed, inputs[2]], f"{name}_packed_biased")
    width = made.shapes[inputs[1]][1]
    sizes = list(settings.get("qkv_hidden_sizes") or [width // 3] * 3)
    split = made.constant(np.array(sizes, np.int64), f"{name}_sizes")
    q, k, v = made.node("Split", [packed, split], f"{name}_part", outputs=3, axis=-1)
    for part, size in zip((q, k, v), sizes, strict=True):
        made.shapes[part] = (*made.shapes[inputs[0]][:2], size)
    return q, k, v


def _biased(inputs: Mapping[int, str], made: _Made, name: str) -> tuple[str, str, str]:
    """Return q, k and v of MultiHeadAttention, with their biases added."""
    import numpy as np

    given = [inputs.get(index, "") for index in range(3)]
    if not all(given):
        raise VerificationError(f"{name} has q, k and v packed", remedy=_REMEDY)
    if not inputs.get(3):
        return given[0], given[1], given[2]
    sizes = [made.shapes[value][-1] for value in given]
    split = made.constant(np.array(sizes, np.int64), f"{name}_bias_sizes")
    parts = made.node("Split", [inputs[3], split], f"{name}_bias", outputs=3, axis=0)
    sums = [made.node("Add", [value, part], f"{part}_added") for value, part in zip(given, parts, strict=True)]
    for total, value in zip(sums, given, strict=True):
        made.shapes[total] = made.shapes[value]
    return sums[0], sums[1], sums[2]


_REMEDY = "Build with enable_attention: false in OrtTransformersOptimization's optimization_options."


def _unknown(node: Any) -> VerificationError:
    return VerificationError(
        f"this adapter computes {node.op_type} wrongly, and {node.name or node.output[0]} cannot be replaced",
        remedy=_REMEDY,
    )
