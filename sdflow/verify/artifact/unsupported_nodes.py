"""Check whether a target supports a graph: a kernel for every node, its version, its types and its attributes.

Uses tables instead of a device; see `sdflow.verify.kernels`. Nodes that only compute shapes are separated, as in
`sdflow.runtime.sessions.placement` with real sessions: GPU providers leave them to the CPU on purpose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sdflow.onnx_model.float8 import reads_float8
from sdflow.onnx_model.int8 import reads_int8
from sdflow.runtime.sessions.shape_nodes import shape_nodes
from sdflow.targets import CPU_PROVIDER, CUDA_PROVIDER, Target
from sdflow.verify.artifact.element_types import STANDARD, element_types, formals, schema_of
from sdflow.verify.finding import Finding
from sdflow.verify.kernels import Condition, Kernel, KernelTable, kernel_table

if TYPE_CHECKING:
    import onnx

ENGINES = (
    "TensorrtExecutionProvider",
    "MIGraphXExecutionProvider",
    "NvTensorRTRTXExecutionProvider",
    "OpenVINOExecutionProvider",
    "QNNExecutionProvider",
    "VitisAIExecutionProvider",
)
"""Providers that compile the whole graph, including shape arithmetic, which then costs nothing."""

NOT_READ = "generating does not use its result; drop that output, or let it run on the CPU"

_SWITCHES = {
    "Attention": ("enable_attention",),
    "BiasAdd": ("enable_bias_add",),
    "BiasGelu": ("enable_bias_gelu",),
    "BiasSplitGelu": ("enable_bias_splitgelu", "enable_bias_add"),
    "EmbedLayerNormalization": ("enable_embed_layer_norm",),
    "FastGelu": ("enable_gelu_approximation",),
    "Gelu": ("enable_gelu",),
    "GemmFastGelu": ("enable_gemm_fast_gelu",),
    "GroupNorm": ("enable_group_norm",),
    "LayerNormalization": ("enable_layer_norm",),
    "MultiHeadAttention": ("enable_attention",),
    "NhwcConv": ("enable_nhwc_conv",),
    "QuickGelu": ("enable_gelu",),
    "RotaryEmbedding": ("enable_rotary_embeddings",),
    "SimplifiedLayerNormalization": ("enable_layer_norm",),
    "SkipGroupNorm": ("enable_skip_group_norm",),
    "SkipLayerNormalization": ("enable_skip_layer_norm", "enable_bias_skip_layer_norm"),
    "SkipSimplifiedLayerNormalization": ("enable_skip_layer_norm",),
}
"""Fused operator -> the options of OrtTransformersOptimization that create it."""


@dataclass(frozen=True)
class _Node:
    """A node with what its support depends on. types, dims: of the values around it, if known."""

    proto: Any
    schema: Any
    types: Mapping[str, str]
    dims: Mapping[str, tuple[int, ...]]

    @property
    def operator(self) -> str:
        domain = "" if self.proto.domain in STANDARD else f"{self.proto.domain}."
        return f"{domain}{self.proto.op_type}"

    @property
    def title(self) -> str:
        return str(self.proto.op_type)

    @property
    def name(self) -> str:
        return str(self.proto.name or self.proto.output[0])

    def input(self, index: int) -> str:
        return self.proto.input[index] if index < len(self.proto.input) else ""

    def attribute(self, name: str, default: Any = None) -> Any:
        from onnx import helper

        for attribute in self.proto.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return value.decode() if isinstance(value, bytes) else value
        return default


def fits(
    model: onnx.ModelProto,
    target: Target,
    submodel: str = "",
    provider: str | None = None,
    *,
    read: Collection[str] | None = None,
) -> list[Finding]:
    """What keeps `target` from running the graph unchanged. External data is not needed.

    provider: one of the target's; default: its preferred one. read: the outputs used for generating; None: all. Nodes
    that serve only unused outputs cost nothing.
    An operator, version, type or attribute without a kernel is an error, or a warning if nothing reads the result; gaps
    in the table are warnings; shape arithmetic on the CPU is a note. Findings that differ only in the node are merged,
    with a count.
    """
    from onnx.inliner import inline_local_functions

    table = kernel_table(provider or target.providers[0][0])
    if model.functions:
        model = inline_local_functions(model)
    idle = _idle(model.graph, read)
    found = [replace(finding, submodel=submodel) for finding in _graph(model.graph, _opsets(model), table, {}, idle)]
    if table.provider != CPU_PROVIDER and not target.session.folded:
        found += [replace(finding, submodel=submodel) for finding in _obstacles(model.graph, table)]
    return _gathered(found)


def fits_elsewhere(
    model: onnx.ModelProto, target: Target, submodel: str = "", *, read: Collection[str] | None = None
) -> list[Finding]:
    """For a target with several providers for different machines: missing kernels of all but the first, as warnings."""
    others = [provider for provider, _, _ in target.providers[1:]] if target.plugins else []
    return [
        replace(each, level="warning", what=f"{each.what}, on machines with that provider")
        for provider in others
        for each in fits(model, target, submodel, provider, read=read)
        if each.level == "error"
    ]


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    return {"" if entry.domain in STANDARD else entry.domain: entry.version for entry in model.opset_import}


def _gathered(findings: list[Finding]) -> list[Finding]:
    """Merge findings that differ only in the node, ordered by first occurrence."""
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, node="", count=1), []).append(finding)
    return [replace(group[0], count=sum(finding.count for finding in group)) for group in groups.values()]


def _idle(graph: Any, read: Collection[str] | None) -> set[str]:
    """The first outputs of the nodes that no used output depends on."""
    needed = {info.name for info in graph.output if read is None or info.name in read}
    idle = set()
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output):
            idle.add(node.output[0])
        else:
            needed.update(node.input)
    return idle


def _graph(
    graph: Any, opsets: Mapping[str, int], table: KernelTable, outer: Mapping[str, str], idle: Collection[str] = ()
) -> Iterator[Finding]:
    types = element_types(graph, opsets, outer)
    dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    on_cpu = {node.output[0] for node in shape_nodes(graph)} if table.provider not in (CPU_PROVIDER, *ENGINES) else ()
    folded = set(dims)
    for proto in graph.node:
        for attribute in proto.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from _graph(inner, opsets, table, types)
        if all(name in folded for name in proto.input if name) and any(proto.input):
            folded.update(proto.output)  # ONNX Runtime folds it when it loads the model
        elif proto.op_type == "Constant":
            folded.update(proto.output)
        elif proto.output[0] not in on_cpu:
            for finding in _judge(_Node(proto, schema_of(proto, opsets), types, dims), table):
                yield replace(finding, level="warning", remedy=NOT_READ) if proto.output[0] in idle else finding


def _judge(node: _Node, table: KernelTable) -> Iterator[Finding]:
    """The findings on a node that has to run on the table's provider."""
    if reads_int8(node.proto):
        if table.provider != CUDA_PROVIDER:
            what = f"{node.title} runs only on CUDA, in sdflow's own kernels"
            yield _error(node, what, "set activations: tensor of QuantizeInt8, or leave the pass out")
        return
    if reads_float8(node.proto):
        if table.provider != CUDA_PROVIDER:
            yield _error(node, f"{node.title} runs only on CUDA, in sdflow's own kernels", "leave QuantizeFp8 out")
        return
    kernels = table.kernels.get(node.operator, ())
    if not kernels and node.operator in table.unknown:
        what = f"the table ({table.version}) does not say whether {table.title} has a kernel for {node.title}"
        yield Finding("", "kernel", "warning", node.name, what, "sdflow run reports where its nodes run")
    elif not kernels:
        yield _error(node, f"{node.title} has no {table.title} kernel", _remedy_for_operator(node, table))
    elif node.schema is None:
        yield _error(node, f"{node.title} of {node.proto.domain!r} has no schema in this opset", "raise target_opset")
    else:
        version = node.schema.since_version
        fitting = [kernel for kernel in kernels if kernel.takes_version(version)]
        if not fitting:
            what = f"{node.title} has no {table.title} kernel for its version {version}"
            newest = max(kernel.first for kernel in kernels)
            yield _error(node, what, f"set target_opset so that the operator's version is at most {newest}")
        elif None not in (wrong := [_wrong_type(node, kernel) for kernel in fitting]):
            name, found, known = max((one for one in wrong if one), key=lambda one: len(one[2]))
            what = f"{node.title} has no {table.title} kernel for {found} {name} (known: {', '.join(sorted(known))})"
            yield _error(node, what, _remedy_for_type(node, found, table))
        for condition in table.conditions:
            if node.operator in condition.operators and (broken := _broken(node, condition)) is not None:
                what = f"{node.title} on {table.title} {condition.reason.format(found=broken)}"
                yield Finding("", "condition", condition.level, node.name, what, condition.remedy)


def _error(node: _Node, what: str, remedy: str) -> Finding:
    if _expands(node):
        remedy = "ONNX Runtime expands it into other operators, which are not checked here"
        return Finding("", "kernel", "warning", node.name, what, remedy)
    return Finding("", "kernel", "error", node.name, what, remedy)


def _expands(node: _Node) -> bool:
    """Whether ONNX Runtime inlines the node's function body, as it does for operators that even the CPU lacks."""
    from onnx import defs

    if node.schema is None or node.proto.domain not in STANDARD or node.operator in kernel_table(CPU_PROVIDER).kernels:
        return False
    schema = defs.get_schema(node.title, node.schema.since_version)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _wrong_type(node: _Node, kernel: Kernel) -> tuple[str, str, frozenset[str]] | None:
    """The first value whose type the kernel does not support: its formal name, its type, the supported types."""
    proto, schema = node.proto, node.schema
    values = [*formals(schema.inputs, proto.input), *formals(schema.outputs, proto.output)]
    indices = {name: str(index) for index, name in reversed(list(enumerate(proto.input)))}
    for formal, name in values:
        for key in ("*", formal.typeStr, formal.name, indices.get(name, "")):
            known, found = kernel.types.get(key), node.types.get(name)
            if known is not None and found is not None and found not in known:
                return formal.name, found, known
    return None


def _broken(node: _Node, condition: Condition) -> str | None:
    """The node's value that violates a condition; None if it is met or unknown."""
    if condition.given is not None and not node.input(condition.given):
        return None
    if condition.attribute is not None:
        value = node.attribute(condition.attribute, condition.default)
        return None if value in condition.values else str(value)
    assert condition.input is not None
    name = node.input(condition.input)
    if condition.present:
        return None if name else "nothing"
    if condition.types:
        found = node.types.get(name)
        return found if found is not None and found not in condition.types else None
    dims = node.dims.get(name)
    if not dims:
        return None
    if condition.rank is not None:
        return None if len(dims) == condition.rank else str(len(dims))
    if condition.last_dimension_per or condition.multiple_of > 1:
        per = node.attribute(condition.last_dimension_per, 1) if condition.last_dimension_per else 1
        count = dims[-1] / max(1, int(per))
        return None if count % condition.multiple_of == 0 else f"{count:g}"
    return None if dims[-1] in condition.last_dimension else str(dims[-1])


# Remedies


def _remedy_for_operator(node: _Node, table: KernelTable) -> str:
    if table.provider == CUDA_PROVIDER and node.proto.op_type in ("DynamicQuantizeLinear", "MatMulIntegerToFloat"):
        return "set activations: row of QuantizeInt8"
    if node.proto.domain in STANDARD:
        return "export without it, or allow it: evaluate: {allow_fallback: true}"
    if not any(operator.startswith("com.microsoft.") for operator in table.kernels):
        return "leave OrtTransformersOptimization out"
    switches = _SWITCHES.get(node.title, ())
    return (
        "set " + " and ".join(f"{name}: false" for name in switches) if switches else "leave out the pass that made it"
    )


def _remedy_for_type(node: _Node, found: str, table: KernelTable) -> str:
    if found == "float16" and table.provider == CPU_PROVIDER:
        return "leave OnnxFloatToFloat16 out: ONNX Runtime would convert to float32 and back in every run, or fail"
    if found == "float16":
        return f"keep it in float32: force_fp32_ops: [{node.title}]"
    return "export with another type, or allow it: evaluate: {allow_fallback: true}"


# Static shapes and CUDA graphs


def _obstacles(graph: Any, table: KernelTable) -> Iterator[Finding]:
    """What keeps shapes from being static, or a CUDA graph from being captured."""
    initializers = {tensor.name for tensor in graph.initializer}
    for info in graph.input:
        if info.name in initializers:
            continue
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") and not dim.dim_param:
                what = f"axis {axis} has neither a size nor a name, so no session can fix it"
                remedy = "export with dynamic_axes that name it"
                yield Finding("", "static-shape", "warning", info.name, what, remedy)
    if shapes := shape_nodes(graph):
        lost = "the engine is built again for each" if table.provider in ENGINES else "no CUDA graph can be captured"
        if table.provider not in (*ENGINES, "CUDAExecutionProvider"):
            lost = "they run on the CPU"
        name, what = shapes[0].name or shapes[0].output[0], "computes a shape at run time; while sizes are left open, "
        remedy = "give the session fixed sizes (add_free_dimension_override_by_name)"
        yield Finding("", "static-shape", "note", str(name), what + lost, remedy, count=len(shapes))
