"""OnnxFloatToFloat16: convert weights and activations to 16 bits with Olive's pass of the same name.

Olive calls `onnxruntime.transformers.onnx_model.OnnxModel.convert_float_to_float16`, which accepts a list of names as
`keep_io_types`. By the pipeline's contract, all inputs and outputs become float16 except the UNet's `timestep`: float16
rounds fractional timesteps near 1000 to halves. The same holds for SDXL's `time_ids` above 2048 pixels.

Keeping the input in float32 is not enough: the sinusoids would still be computed in float16, from angles of up to 1000
radians rounded to halves. So the nodes between a kept input and the first weighted layer stay float32 too, as in
diffusers; ONNX Runtime then leaves one Cast, in front of that layer.

With `precision: bfloat16` (`sdflow.passes.bfloat16`), all inputs and outputs stay float32: numpy has no bfloat16, and
casting latents and embeddings takes microseconds.

Differences from Olive: `force_fp16_inputs` is forwarded, and weights that unexpectedly stay float32 are an error.
Values are clamped at float16's own limits, ONNX Runtime's defaults, instead of Olive's 1e4 and 1e-7.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE, Facts
from sdflow.errors import PassError
from sdflow.models.ports import EXACT
from sdflow.onnx_model.facts import dtype_name, graph_facts, tensor_bytes
from sdflow.onnx_model.files import write_graph
from sdflow.onnx_model.stub import is_stub
from sdflow.passes.base import EDITS_GRAPH, Pass, PassConfig, PassInputs
from sdflow.passes.bfloat16 import NO_KERNEL, bfloat16_bits, relabel
from sdflow.passes.olive import run_olive_pass
from sdflow.processes.patched import patched

KeepFloat32 = bool | tuple[str, ...]
"""True: all inputs and outputs stay float32. False: none. Names: these, if the model has them."""

SMALLEST = 5.96e-08
LARGEST = 65504.0

WEIGHTED = frozenset({"Attention", "Conv", "Gemm", "LayerNormalization", "MatMul", "MultiHeadAttention", "NhwcConv"})
"""Operators with weights. A path from a float32 input turns to float16 in front of the first of them."""

ALWAYS_FLOAT32 = {"Resize": (1, 2), "GroupNorm": (1, 2), "SkipGroupNorm": (1, 2)}
"""Input indices without a float16 kernel on CUDA (ALWAYS_FLOAT_INPUTS in onnxruntime/transformers/float16.py)."""


class OnnxFloatToFloat16Config(PassConfig):
    """Olive's options, with types, and force_fp16_inputs."""

    min_positive_val: float = Field(
        default=SMALLEST, ge=SMALLEST, description="smaller nonzero weights are raised to this"
    )
    max_finite_val: float = Field(default=LARGEST, gt=0, le=LARGEST, description="larger weights are clamped to this")
    keep_io_types: KeepFloat32 = Field(
        default=EXACT, description="inputs and outputs that stay float32: true, false, or names"
    )
    use_symbolic_shape_infer: bool = Field(default=True, description="needed for fused models")
    op_block_list: tuple[str, ...] | None = Field(default=None, description="operator types that stay float32")
    op_include_list: tuple[str, ...] | None = Field(
        default=None, description="only these operator types become float16"
    )
    node_block_list: tuple[str, ...] | None = Field(
        default=None, description="nodes that stay float32, by name or by a pattern like */wo/MatMul"
    )
    node_include_list: tuple[str, ...] | None = Field(default=None, description="only these nodes become float16")
    force_fp16_inputs: Mapping[str, tuple[int, ...]] | None = Field(
        default=None,
        description="operator type -> inputs (indices) to convert although ONNX Runtime keeps them float32",
    )
    precision: Literal["float16", "bfloat16"] = Field(
        default="float16", description="the 16-bit type; set by the submodel's `precision`"
    )

    @model_serializer(mode="wrap")
    def _without_float16(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `precision` if it is float16, to keep the cache keys from before the option existed."""
        found: dict[str, Any] = handler(self)
        return {name: value for name, value in found.items() if (name, value) != ("precision", "float16")}

    @model_validator(mode="after")
    def _one_list_each(self) -> OnnxFloatToFloat16Config:
        for kind in ("op", "node"):
            if getattr(self, f"{kind}_block_list") is not None and getattr(self, f"{kind}_include_list") is not None:
                raise ValueError(f"{kind}_block_list and {kind}_include_list are mutually exclusive")
        return self


class OnnxFloatToFloat16(Pass[OnnxFloatToFloat16Config]):
    """Converts float32 to float16."""

    name: ClassVar[str] = "OnnxFloatToFloat16"
    version: ClassVar[int] = 1
    uses: ClassVar[tuple[str, ...]] = ("olive-ai", "onnxruntime", "onnx", "numpy", "sympy")
    imports = EDITS_GRAPH
    moves_weights: ClassVar[bool] = True
    Config: ClassVar[type[PassConfig]] = OnnxFloatToFloat16Config

    def run(self, inputs: PassInputs, out: Path, config: OnnxFloatToFloat16Config) -> Facts:
        source = self.source(inputs)
        inputs.progress(f"converting to {config.precision}")
        convert_to_float16(source, out, **{name: getattr(config, name) for name in type(config).model_fields})
        return {**graph_facts(out / MODEL_FILE), **float16_facts(out)}


def convert_to_float16(
    model: Path,
    out: Path,
    *,
    keep_io_types: KeepFloat32,
    op_block_list: Sequence[str] | None = None,
    node_block_list: Sequence[str] | None = None,
    op_include_list: Sequence[str] | None = None,
    node_include_list: Sequence[str] | None = None,
    force_fp16_inputs: Mapping[str, Sequence[int]] | None = None,
    min_positive_val: float = SMALLEST,
    max_finite_val: float = LARGEST,
    use_symbolic_shape_infer: bool = True,
    precision: str = "float16",
) -> None:
    """Convert the artifact `model` into `out`. The options are the pass's.

    Raises PassError if there is nothing to convert, or if weights stay float32 that no option excludes.
    """
    import onnx

    source = onnx.load(str(model / MODEL_FILE), load_external_data=False)
    if not any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in source.graph.initializer):
        raise PassError("the model has no float32 weights", where="OnnxFloatToFloat16", remedy="Leave the pass out.")
    kept = [] if isinstance(keep_io_types, bool) else nodes_before_weights(source.graph, keep_io_types)
    matched = matched_nodes(source.graph, node_block_list or ())
    blocked_ops = _default_op_block_list() if op_block_list is None else list(op_block_list)
    brain = precision == "bfloat16"
    options: dict[str, Any] = {
        "min_positive_val": min_positive_val,
        "max_finite_val": max_finite_val,
        "keep_io_types": brain or (keep_io_types if isinstance(keep_io_types, bool) else list(keep_io_types)),
        "use_symbolic_shape_infer": use_symbolic_shape_infer,
        "op_block_list": [*blocked_ops, *(NO_KERNEL if brain else ())],
    }
    if op_include_list is not None:
        included = [name for name in op_include_list if not brain or name not in NO_KERNEL]
        options |= {"op_block_list": None, "op_include_list": included}
    if node_include_list is not None:
        options["node_include_list"] = [name for name in node_include_list if name not in set(kept)]
    else:
        options["node_block_list"] = [*(node_block_list or ()), *matched, *kept]
    with _forced_inputs(force_fp16_inputs or {}), bfloat16_bits() if brain else contextlib.nullcontext():
        run_olive_pass("OnnxFloatToFloat16", options, model, out, keep_weights_on_disk=True)
    result = onnx.load(str(out / MODEL_FILE), load_external_data=False)
    changed = merge_equal_casts(result.graph)
    if kept or matched:
        changed |= undo_round_trips(result.graph, {*kept, *matched}, keep_io_types)
    blocked = set(options.get("node_block_list") or ()) | set(kept)
    if op_include_list is None and node_include_list is None:
        _check_weights(result.graph, blocked, set(options["op_block_list"]), force_fp16_inputs or {})
    if not isinstance(keep_io_types, bool):
        _check_kept(result.graph, keep_io_types, set(kept))
    if brain:
        relabel(result)
    if brain or changed:
        write_graph(result, out)


def matched_nodes(graph: Any, patterns: Sequence[str]) -> list[str]:
    """Return the names of nodes that match a pattern and are not listed verbatim, in graph order.

    A pattern may match nothing: base workflows serve several architectures.
    """
    names = [node.name for node in graph.node if node.name not in patterns]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def merge_equal_casts(graph: Any) -> bool:
    """Remove all but one of the Casts with the same output, which is invalid in a graph. Return whether there were any.

    ONNX Runtime's converter inserts one for each blocked node that reads a value, all with the same output name.
    """
    seen: set[str] = set()
    twice = []
    for node in graph.node:
        if node.op_type == "Cast" and node.output[0] in seen:
            twice.append(node)
        seen.update(node.output)
    for node in reversed(twice):
        graph.node.remove(node)
    return bool(twice)


def nodes_before_weights(graph: Any, names: Sequence[str]) -> list[str]:
    """Return the names of the nodes on paths from inputs `names` to the first weighted layers, in graph order.

    Includes their Constant nodes: frequencies rounded to float16 distort the angles just as much.
    """
    inputs = {item.name for item in graph.input} & set(names)
    reached = set(inputs)
    chosen: list[Any] = []
    for node in graph.node:
        if node.op_type not in WEIGHTED and reached.intersection(node.input):
            chosen.append(node)
            reached.update(node.output)
    needed = {name for node in chosen for name in node.input}
    constants = [node for node in graph.node if node.op_type == "Constant" and needed.intersection(node.output)]
    return [node.name for node in (*constants, *chosen)]


def undo_round_trips(graph: Any, kept: set[str], inputs: bool | Sequence[str]) -> bool:
    """Remove Cast pairs through float16 between nodes in `kept`. Return whether anything changed.

    ONNX Runtime's converter casts around every blocked node and then removes the pairs, except around blocked Casts.
    """
    changed = False
    while True:
        producers = {name: node for node in graph.node for name in node.output}
        exact = {name for node in graph.node if node.name in kept for name in node.output}
        exact |= set() if isinstance(inputs, bool) else {item.name for item in graph.input if item.name in inputs}
        for node in graph.node:
            before = producers.get(node.input[0]) if _casts_to(node, "float32") else None
            if before is not None and _casts_to(before, "float16") and before.input[0] in exact:
                break
        else:
            return changed
        _bypass(graph, node, before.input[0])
        if not any(before.output[0] in other.input for other in graph.node):
            graph.node.remove(before)
        changed = True


def _bypass(graph: Any, node: Any, value: str) -> None:
    """Remove `node` and connect its readers to `value`."""
    for other in graph.node:
        for index, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[index] = value
    graph.node.remove(node)


def _casts_to(node: Any, dtype: str) -> bool:
    return bool(node.op_type == "Cast" and any(a.name == "to" and dtype_name(a.i) == dtype for a in node.attribute))


def float16_facts(out: Path) -> dict[str, Any]:
    """Count weights at float16's limits: {"at_limit": {"largest": count, "smallest": count}}, and `beyond_float16`."""
    import numpy as np
    import onnx

    from sdflow.weights.finite import beyond_float16

    counts = {"largest": 0, "smallest": 0}
    cut: dict[str, int] = {}
    model = onnx.load(str(out / MODEL_FILE), load_external_data=False)
    data = np.memmap(out / WEIGHTS_FILE, dtype=np.uint8, mode="r") if (out / WEIGHTS_FILE).exists() else None
    for tensor in model.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT16 or is_stub(tensor):
            continue
        if tensor.data_location == onnx.TensorProto.EXTERNAL and data is not None:
            offset = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
            bits = data[offset : offset + tensor_bytes(tensor)].view(np.uint16)
        else:
            bits = onnx.numpy_helper.to_array(tensor).view(np.uint16)
        magnitudes = bits & 0x7FFF
        if largest := int(np.count_nonzero(magnitudes == 0x7BFF)):
            cut[tensor.name] = largest
        counts["largest"] += largest
        counts["smallest"] += int(np.count_nonzero(magnitudes == 0x0001))
    return {"at_limit": counts, **beyond_float16(cut)}


def _default_op_block_list() -> list[str]:
    """Return ONNX Runtime's operators without float16 kernels, Olive's default for None."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    return list(DEFAULT_OP_BLOCK_LIST)


@contextlib.contextmanager
def _forced_inputs(forced: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """While active, pass `force_fp16_inputs` to ONNX Runtime's converter; Olive's pass has no such option."""
    if not forced:
        yield
        return
    from onnxruntime.transformers.onnx_model import OnnxModel

    original = OnnxModel.convert_float_to_float16
    inputs = {name: list(indices) for name, indices in forced.items()}

    def forwarding(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, force_fp16_inputs=inputs, **options)

    with patched(OnnxModel, convert_float_to_float16=forwarding):
        yield


def _check_weights(graph: Any, blocked: set[str], blocked_ops: set[str], forced: Mapping[str, Sequence[int]]) -> None:
    """Raise PassError for a float32 weight that no blocked node or operator rule explains."""
    allowed: set[str] = set()
    for node in graph.node:
        if node.name in blocked or node.op_type in blocked_ops:
            allowed.update(node.input)
        else:
            always = set(ALWAYS_FLOAT32.get(node.op_type, ())) - set(forced.get(node.op_type, ()))
            allowed.update(name for index, name in enumerate(node.input) if index in always)
    left = [
        tensor.name
        for tensor in graph.initializer
        if dtype_name(tensor.data_type) == "float32" and tensor.name not in allowed
    ]
    if left:
        raise PassError(
            f"{len(left)} weights stayed float32: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}",
            where="OnnxFloatToFloat16",
            remedy="If intended, list their nodes in node_block_list.",
        )


def _check_kept(graph: Any, names: Sequence[str], kept: set[str]) -> None:
    """Raise PassError unless kept inputs are float32 and reach their nodes without a Cast to float16."""
    import onnx

    reached = {
        item.name
        for item in graph.input
        if item.name in names and item.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    }
    found: set[str] = set()
    for node in graph.node:
        if reached.intersection(node.input) and not _casts_to(node, "float16") and node.op_type not in WEIGHTED:
            found.add(node.name)
            reached.update(node.output)
    lost = sorted(node.name for node in graph.node if node.name in kept - found and node.op_type != "Constant")
    if lost:
        raise PassError(
            f"{', '.join(lost[:5])} would be computed from a float16 {' or '.join(names)}", where="OnnxFloatToFloat16"
        )
