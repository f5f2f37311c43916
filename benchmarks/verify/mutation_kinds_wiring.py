"""More kinds of faults for `mutations.py`: correct parts wired wrongly, and wrong words instead of numbers in configs.

A pass or an exporter can make these mistakes without any wrong number: a time embedding's bias in another block, the
halves of a skip connection swapped, a block left out, heads split differently, a square matrix not transposed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import numpy_helper

from benchmarks.verify.mutated_folder import (
    FLOATS,
    Chance,
    Folder,
    Graph,
    change_json,
    get_attribute,
    graph_of,
    set_attribute,
)
from sdflow.artifact import CONFIG_FILE, INDEX_FILE
from sdflow.onnx_model.files import is_external

OTHER_WORDS: Mapping[str, list[Any]] = {
    "prediction_type": ["epsilon", "v_prediction", "sample"],
    "beta_schedule": ["linear", "scaled_linear", "squaredcos_cap_v2"],
    "timestep_spacing": ["leading", "trailing", "linspace"],
    "act_fn": ["silu", "gelu", "mish"],
    "hidden_act": ["quick_gelu", "gelu"],
    "time_embedding_type": ["positional", "fourier"],
}
"""What a word of a config may be besides."""


def _shapes(graph: Graph) -> dict[str, tuple[Any, ...]]:
    values = (*graph.graph.value_info, *graph.graph.output)
    return {
        item.name: (
            item.type.tensor_type.elem_type,
            *(each.dim_param or each.dim_value for each in item.type.tensor_type.shape.dim),
        )
        for item in values
    }


def _behind(graph: Graph, value: str) -> set[str]:
    """Every value that is computed from one."""
    found, waiting = {value}, [value]
    readers: dict[str, list[Any]] = {}
    for node in graph.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    while waiting:
        for node in readers.get(waiting.pop(), ()):
            waiting += [name for name in node.output if name not in found]
            found.update(node.output)
    return found


def results_exchanged(folder: Folder, chance: Chance) -> str | None:
    """Results of two weights of one shape, neither computed from the other, each in the place of the other: a block's time bias
    in another block, queries for keys."""
    graph = graph_of(folder, chance)
    sizes = {each.name: tuple(each.dims) for each in graph.graph.initializer}
    alike: dict[Any, list[str]] = {}
    for node in graph.nodes("Gemm", "MatMul", "Conv", "NhwcConv"):
        if node.input[1] in sizes and graph.read(node.output[0]):
            alike.setdefault((node.op_type, sizes[node.input[1]]), []).append(node.output[0])
    if not (groups := [names for names in alike.values() if len(names) > 1]):
        return None
    one, other = chance.sample(chance.choice(groups), 2)
    if other in _behind(graph, one) or one in _behind(graph, other):
        return None
    graph.reread({one: other, other: one})
    graph.save()
    return f"{graph.submodel}: results {one} and {other} exchanged"


def block_skipped(folder: Folder, chance: Chance) -> str | None:
    """A sum's readers read an earlier sum of the same shape: what lies between is left out, as a wrong clip_skip does."""
    graph = graph_of(folder, chance)
    shapes = _shapes(graph)
    sums = [node.output[0] for node in graph.nodes("Add") if shapes.get(node.output[0], (0,))[0] in FLOATS]
    pairs = [
        (early, late)
        for place, early in enumerate(sums)
        for late in sums[place + 1 : place + 12]
        if shapes[early] == shapes[late] and graph.read(late) and late in _behind(graph, early)
    ]
    if not pairs:
        return None
    early, late = chance.choice(pairs)
    graph.reread({late: early})
    graph.save()
    return f"{graph.submodel}: {early} is read for {late}"


def heads(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    found = [node for node in graph.nodes("MultiHeadAttention", "Attention") if get_attribute(node, "num_heads") > 1]
    if not found:
        return None
    node = chance.choice(found)
    set_attribute(node, "num_heads", get_attribute(node, "num_heads") // 2)
    graph.save()
    return f"{graph.submodel}: half the heads of {node.name}"


def order(folder: Folder, chance: Chance) -> str | None:
    """The parts of a concatenation in the other order."""
    graph = graph_of(folder, chance)
    found = [node for node in graph.nodes("Concat") if len(set(node.input)) > 1]
    found = [node for node in found if graph.type_of(node.output[0]) in FLOATS]
    if not found:
        return None
    node = chance.choice(found)
    reversed_inputs = [*node.input][::-1]
    del node.input[:]
    node.input.extend(reversed_inputs)
    graph.save()
    return f"{graph.submodel}: {node.name} in the other order"


def softmax_axis(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    if not (found := graph.nodes("Softmax")):
        return None
    node = chance.choice(found)
    set_attribute(node, "axis", -2)
    graph.save()
    return f"{graph.submodel}: {node.name} over the other axis"


def weight_transposed(folder: Folder, chance: Chance) -> str | None:
    """A square matrix as it is stored."""
    graph = graph_of(folder, chance)
    square = [
        each
        for each in graph.graph.initializer
        if each.data_type in FLOATS and is_external(each) and len(each.dims) == 2 and each.dims[0] == each.dims[1]
    ]
    if not square:
        return None
    tensor = chance.choice(square)
    values = graph.weights_of(tensor)
    values[...] = np.array(values).T
    values.flush()
    return f"{graph.submodel}: {tensor.name} transposed"


def bias_lost(folder: Folder, chance: Chance) -> str | None:
    """Zeros for a bias that the graph itself has, or a convolution without its bias."""
    graph = graph_of(folder, chance)
    tensors = {each.name: each for each in graph.graph.initializer}
    found = [
        node
        for node in graph.nodes("Conv", "NhwcConv", "Gemm", "LayerNormalization")
        if len(node.input) > 2 and node.input[2] in tensors
    ]
    if not found:
        return None
    node = chance.choice(found)
    tensor = tensors[node.input[2]]
    zeros = numpy_helper.from_array(np.zeros(tuple(tensor.dims), FLOATS[tensor.data_type]), f"{tensor.name}/lost")
    graph.graph.initializer.append(zeros)
    node.input[2] = zeros.name
    graph.save()
    return f"{graph.submodel}: {node.name} without its bias"


def _word(folder: Folder, name: str, chance: Chance) -> str | None:
    """A word or a flag of a config."""
    found = json.loads((folder.path / name).read_text(encoding="utf-8"))
    keys = [key for key, value in found.items() if isinstance(value, bool) or (value and key in OTHER_WORDS)]
    if not keys:
        return None
    key = chance.choice(keys)
    before = found[key]
    after = (
        not before if isinstance(before, bool) else chance.choice([word for word in OTHER_WORDS[key] if word != before])
    )
    change_json(folder, name, lambda value: value.update({key: after}))
    return f"{name}: {key} {before} -> {after}"


def scheduler_word(folder: Folder, chance: Chance) -> str | None:
    return _word(folder, "scheduler/scheduler_config.json", chance)


def config_word(folder: Folder, chance: Chance) -> str | None:
    submodel = chance.choice(folder.submodels)
    folder.own(submodel)
    return _word(folder, f"{submodel}/{CONFIG_FILE}", chance)


def tokenizer_setting(folder: Folder, chance: Chance) -> str | None:
    """The longest text, the token that fills, whether words are made small."""
    names = [each.parent.name for each in folder.path.glob("tokenizer*/tokenizer_config.json")]
    if not names:
        return None
    name = f"{chance.choice(names)}/tokenizer_config.json"
    found = json.loads((folder.path / name).read_text(encoding="utf-8"))
    changes = {"model_max_length": 76, "pad_token": "!", "unk_token": "a", "bos_token": "b", "errors": "ignore"}
    changes |= {"do_lower_case": not found.get("do_lower_case", True), "add_prefix_space": True}
    if not (keys := [key for key, value in changes.items() if key in found and found[key] != value]):
        return None
    key = chance.choice(keys)
    change_json(folder, name, lambda value: value.update({key: changes[key]}))
    return f"{name}: {key} {found[key]!r} -> {changes[key]!r}"


def tokenizer_rule(folder: Folder, chance: Chance) -> str | None:
    """What the fast tokenizer does before and after it looks words up."""
    names = [each.parent.name for each in folder.path.glob("tokenizer*/tokenizer.json")]
    if not names:
        return None
    name, key = (
        f"{chance.choice(names)}/tokenizer.json",
        chance.choice(["normalizer", "post_processor", "added_tokens"]),
    )
    if not json.loads((folder.path / name).read_text(encoding="utf-8")).get(key):
        return None
    change_json(folder, name, lambda value: value.update({key: [] if key == "added_tokens" else None}))
    return f"{name}: no {key}"


def index_option(folder: Folder, chance: Chance) -> str | None:
    """A flag of model_index.json, such as force_zeros_for_empty_prompt."""
    return _word(folder, INDEX_FILE, chance)


WIRING: Mapping[str, Callable[[Folder, Chance], str | None]] = {
    each.__name__: each
    for each in (
        results_exchanged, block_skipped, heads, order, softmax_axis, weight_transposed, bias_lost, scheduler_word,
        config_word, tokenizer_setting, tokenizer_rule, index_option,
    )
}  # fmt: skip
