"""Split a denoiser in three parts that run once per image, once per schedule, and once per step:

    text      the prompt's inputs -> the keys and values of every cross-attention          once per image
    timestep  all timesteps of a schedule at once -> the projected time embeddings        once per schedule
    step      sample, those values -> out_sample                                          once per step

With guidance, `sample` has N rows and `out_sample` 2 N, without and with the prompt: values that do not depend on the
text are computed for N rows, and doubled where the text comes in. This is exact as long as both halves of the batch
share latents and timestep, as in classifier-free guidance.

Values that depend on no input but are too large to fold, such as rotary embeddings of image positions, are computed in
each part that reads them.

The parts are cut from the artifact's graph by the dependencies of its nodes, for fixed sizes (`specialize`). The
artifact is unchanged, and the parts read its data file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdflow.errors import PassError
from sdflow.onnx_model.nodes import copied, first_output
from sdflow.runtime.denoiser.moving import Moving
from sdflow.runtime.sessions.specialize import specialize

_ONE_SCALE = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")
STEPS = "steps"
"""Axis of a part that takes any number of timesteps."""


@dataclass(frozen=True)
class Parts:
    """The parts, each a ModelProto whose weights refer to the artifact's data file.

    text: the model's other inputs (encoder_hidden_states etc., `rows` rows) -> `text_values`.
    timestep: `timestep` of shape [steps], any number -> `time_values`, each with `steps` rows.
    step: `sample` (latents of `latents` rows), `text_values`, `time_values` -> `out_sample` of `rows` rows. Each time
        value is one step's row, repeated to the number of rows of the step's input.
    rows: batch size of the whole model. latents: rows of `sample`, half as many with guidance. moving: the names of
        `sample` and `timestep`.
    """

    text: Any
    timestep: Any
    step: Any
    text_values: tuple[str, ...]
    time_values: tuple[str, ...]
    rows: int
    latents: int
    moving: Moving


def split(model: Any, sizes: Mapping[str, int], *, moving: Moving, guidance: bool) -> Parts:
    """Split a denoiser's ModelProto for these sizes.

    sizes: axis name -> size, as for `specialize`; `batch` is that of the whole model, 2 N with guidance. moving: inputs
    that change from step to step. guidance: rows of `sample` represent both halves of the batch.
    Raises PassError for an odd batch with guidance, and for a graph whose time embedding cannot be computed for several
    timesteps at once. That includes quantization with one scale for all rows: results would depend on the other
    timesteps.
    """
    rows = sizes["batch"]
    if guidance and rows % 2:
        raise PassError(f"a batch of {rows} cannot be halved", where="split", remedy="Use an even batch.")
    whole = specialize(model, sizes)
    half = specialize(model, {**sizes, "batch": rows // 2}) if guidance else whole
    reach = _reach(whole.graph)
    inputs = {item.name for item in whole.graph.input}
    text_inputs = inputs - {moving.latents, moving.timestep}
    kinds = {"fixed": [], "text": [], "time": [], "latents": [], "rest": []}  # type: dict[str, list[int]]
    for index, node in enumerate(whole.graph.node):
        kinds[_kind(reach[first_output(node)], text_inputs, moving.timestep, guidance)].append(index)
    fixed = [whole.graph.node[i] for i in kinds["fixed"]]
    if shared := [whole.graph.node[i] for i in kinds["time"] if whole.graph.node[i].op_type in _ONE_SCALE]:
        raise PassError(
            f"{shared[0].name} quantizes a value that depends only on the timestep, with one scale for all timesteps",
            where="split",
            remedy='Exclude these layers, such as keep: ["/time_embedding/*", "*/time_emb_proj/*"]; they are computed '
            "only once for all steps.",
        )
    made = {
        kind: {name for index in found for name in whole.graph.node[index].output if name}
        for kind, found in kinds.items()
    }
    made["latents"].add(moving.latents) if guidance else None

    text, rest = [whole.graph.node[i] for i in kinds["text"]], [copied(whole.graph.node[i]) for i in kinds["rest"]]
    text = [*map(copied, text), *_unpack_keys_and_values(rest, made["text"], _types(whole.graph))]
    made["text"].update(name for node in text for name in node.output)
    halves = {first_output(node): node for node in half.graph.node}
    latents = [copied(halves[first_output(whole.graph.node[i])]) for i in kinds["latents"]]
    text = [*_fixed_for(text, fixed, "text"), *text]
    if guidance:  # with half the rows, some may be small enough to fold
        small = [halves[first_output(node)] for node in fixed if first_output(node) in halves]
        latents = [*_fixed_for(latents, small, "half"), *latents]
    doubles, transposed = _double(rest, made["latents"], whole.graph)
    step_nodes = [*latents, *doubles, *transposed, *_fixed_for(rest, fixed, ""), *rest]
    results = [item.name for item in whole.graph.output]
    text_values = _read(step_nodes, made["text"], results)
    time_values = _read(step_nodes, made["time"], results)

    text_model = _model(whole, "text", text, sorted(text_inputs), text_values)
    half_constants = _separate(latents, half.graph, whole.graph) if guidance else []
    extra = sorted(text_inputs.intersection(_read(step_nodes, text_inputs, [])))
    step_model = _model(whole, "step", step_nodes, [moving.latents, *extra, *text_values, *time_values], results)
    step_model.graph.initializer.extend(half_constants)
    if guidance:
        _set_types(step_model.graph, half.graph, [moving.latents, *_read(latents, set(time_values), [])])
    timed = [copied(whole.graph.node[i]) for i in kinds["time"]]
    time_model = _timestep_part(whole, [*_fixed_for(timed, fixed, ""), *timed], moving.timestep, time_values)
    step_model = specialize(step_model, {})  # to restore the shapes of all values
    latent_rows = rows // 2 if guidance else rows
    return Parts(text_model, time_model, step_model, text_values, time_values, rows, latent_rows, moving)


def _kind(reached: frozenset[str], text_inputs: Collection[str], timestep: str, guidance: bool) -> str:
    if not reached:
        return "fixed"
    if reached <= set(text_inputs):
        return "text"
    if reached == {timestep}:
        return "time"
    if guidance and not reached & set(text_inputs):
        return "latents"
    return "rest"


def _reach(graph: Any) -> dict[str, frozenset[str]]:
    """Map each value to the graph inputs that it depends on."""
    found = {item.name: frozenset([item.name]) for item in graph.input}
    for node in graph.node:
        reached = frozenset[str]().union(*(found.get(name, frozenset()) for name in node.input))
        found.update(dict.fromkeys(node.output, reached))
    return found


def _fixed_for(nodes: Sequence[Any], fixed: Sequence[Any], suffix: str) -> list[Any]:
    """Copy the nodes of `fixed` that `nodes` read, directly or indirectly, in order. suffix: appended to the names of
    their outputs, so two parts can have copies; `nodes` are changed accordingly. "": keep the names."""
    makers = {name: index for index, node in enumerate(fixed) for name in node.output if name}
    waiting = [name for node in nodes for name in node.input if name in makers]
    needed: set[int] = set()
    while waiting:
        index = makers[waiting.pop()]
        if index not in needed:
            needed.add(index)
            waiting += [name for name in fixed[index].input if name in makers]
    copies = [copied(fixed[index]) for index in sorted(needed)]
    if suffix:
        renamed = {name: f"{name}/{suffix}" for node in copies for name in node.output if name}
        for node in (*copies, *nodes):
            node.input[:] = [renamed.get(name, name) for name in node.input]
        for node in copies:
            node.output[:] = [renamed.get(name, name) for name in node.output]
            node.name = node.name and f"{node.name}/{suffix}"
    return copies


def _types(graph: Any) -> dict[str, Any]:
    return {item.name: item.type for item in (*graph.input, *graph.value_info, *graph.output)}


def _shape(kind: Any) -> tuple[int, ...]:
    return tuple(axis.dim_value for axis in kind.tensor_type.shape.dim)


def _read(nodes: Sequence[Any], values: Collection[str], results: Sequence[str]) -> tuple[str, ...]:
    """Return the members of `values` that nodes read or that are results, in order of occurrence."""
    names = dict.fromkeys([*(name for node in nodes for name in node.input), *results])
    return tuple(name for name in names if name in values)


def _unpack_keys_and_values(rest: Sequence[Any], text: Collection[str], types: dict[str, Any]) -> list[Any]:
    """Return nodes for the text part that unpack keys and values, (B, L, heads, 2, size); their readers in `rest` are
    changed to read (B, L, heads x size) each. Otherwise the provider unpacks them in every step
    (attention_prepare_qkv.cu, PrepareQkv_MHA_PackedKV)."""
    import numpy as np
    from onnx import helper, numpy_helper

    nodes: dict[str, list[Any]] = {}
    for node in rest:
        packed = node.input[1] if node.op_type == "MultiHeadAttention" and len(node.input) == 2 else ""
        if packed not in text:
            continue
        batch, length, heads, _, size = _shape(types[packed])
        parts = [f"{packed}/key", f"{packed}/value"]
        shape = numpy_helper.from_array(np.array([batch, length, heads * size], np.int64))
        nodes[packed] = [
            helper.make_node("Split", [packed], [f"{part}/split" for part in parts], f"{packed}/Split", axis=3),
            helper.make_node("Constant", [], [f"{packed}/shape"], f"{packed}/Constant", value=shape),
            *(helper.make_node("Reshape", [f"{p}/split", f"{packed}/shape"], [p], f"{p}/Reshape") for p in parts),
        ]
        for part in parts:
            element = types[packed].tensor_type.elem_type
            types[part] = helper.make_tensor_type_proto(element, (batch, length, heads * size))
        node.input[:] = [node.input[0], *parts]
    return [node for found in nodes.values() for node in found]


def _double(rest: Sequence[Any], latents: Collection[str], whole: Any) -> tuple[list[Any], list[Any]]:
    """Return nodes that double the rows of values that `rest` reads from the latents' part, and Transposes moved behind
    the doubling; otherwise a value that is read in both layouts is doubled twice. Changes `rest` to read the
    doubles."""
    from onnx import helper

    producers = {name: node for node in whole.node for name in node.output if name}
    names: dict[str, str] = {}
    moved: dict[str, Any] = {}
    for node in rest:
        for index, name in enumerate(node.input):
            if name not in latents:
                continue
            producer = producers.get(name)
            if producer is not None and producer.op_type == "Transpose" and producer.input[0] in latents:
                if name not in moved:
                    moved[name] = copied(producer)
                    moved[name].name += "/both"
                    moved[name].input[0] = names.setdefault(producer.input[0], f"{producer.input[0]}/both")
                    moved[name].output[0] = f"{name}/both"
                node.input[index] = f"{name}/both"
            else:
                node.input[index] = names.setdefault(name, f"{name}/both")
    doubles = [helper.make_node("Concat", [a, a], [b], f"{b}/Concat", axis=0) for a, b in names.items()]
    return doubles, list(moved.values())


def _separate(nodes: Sequence[Any], half: Any, whole: Any) -> list[Any]:
    """Return renamed copies of the constants of `nodes` (from graph `half`) whose values differ in `whole`; changes the
    nodes to read them."""
    values = {tensor.name: tensor for tensor in whole.initializer}
    renamed: dict[str, Any] = {}
    for tensor in half.initializer:
        other = values.get(tensor.name)
        if other is None or tensor.SerializeToString() != other.SerializeToString():
            renamed[tensor.name] = copied(tensor)
            renamed[tensor.name].name += "/half"
    used: set[str] = set()
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in renamed:
                node.input[index] = renamed[name].name
                used.add(name)
    return [renamed[name] for name in sorted(used)]


def _model(whole: Any, name: str, nodes: Sequence[Any], inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Return a ModelProto of these nodes with the initializers they read. Inputs and outputs have `whole`'s types."""
    import onnx

    types = _types(whole.graph)
    model = onnx.ModelProto(ir_version=whole.ir_version)
    model.opset_import.extend(whole.opset_import)
    graph = model.graph
    graph.name = name
    graph.node.extend(nodes)
    read = {value for node in nodes for value in node.input}
    graph.initializer.extend(copied(tensor) for tensor in whole.graph.initializer if tensor.name in read)
    for values, field in ((inputs, graph.input), (outputs, graph.output)):
        for value in values:
            field.add(name=value).type.CopyFrom(types.get(value) or _unpacked_type(types, value))
    return model


def _unpacked_type(types: Mapping[str, Any], value: str) -> Any:
    """Return the type of a key or value from `_unpack_keys_and_values`."""
    from onnx import helper

    packed = types[value.rpartition("/")[0]]
    batch, length, heads, _, size = _shape(packed)
    return helper.make_tensor_type_proto(packed.tensor_type.elem_type, (batch, length, heads * size))


def _set_types(graph: Any, source: Any, names: Sequence[str]) -> None:
    types = _types(source)
    for item in graph.input:
        if item.name in names:
            item.type.CopyFrom(types[item.name])


def _timestep_part(whole: Any, made: Sequence[Any], name: str, outputs: Sequence[str]) -> Any:
    """Return the nodes `made` from the timestep to `outputs` as a model for any number of timesteps, without the Expand
    to the batch. Raises PassError if they do not return one row per timestep."""
    from onnx import helper

    nodes, same = [], {}  # type: list[Any], dict[str, str]
    types = _types(whole.graph)
    for node in made:
        node.input[:] = [same.get(value, value) for value in node.input]
        if node.op_type == "Expand" and len(_shape(types[node.output[0]])) == 1:
            same[node.output[0]] = node.input[0]
        else:
            nodes.append(node)
    model = _model(whole, name, nodes, [name], outputs)
    (timestep,) = model.graph.input
    timestep.type.CopyFrom(helper.make_tensor_type_proto(timestep.type.tensor_type.elem_type, [STEPS]))
    checked = {item.name: _shape(item.type) for item in specialize(model, {STEPS: 3}).graph.output}
    for item in model.graph.output:
        if checked[item.name][:1] != (3,) or checked[item.name][1:] != _shape(item.type)[1:]:
            raise PassError(
                f"{item.name} has shape {list(checked[item.name])} for 3 timesteps, not one row per timestep",
                where="split",
                remedy="Use the whole graph.",
            )
        item.type.tensor_type.shape.dim[0].dim_param = STEPS
    return model
