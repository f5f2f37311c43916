"""Kinds of faults that `mutations.py` plants, each at a random place and of a random size.

A kind takes a Folder and a random source. It returns a description of its change, or None if there is no place for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks.verify.mutated_folder import (
    FLOATS,
    Chance,
    Folder,
    Graph,
    change_json,
    get_attribute,
    graph_among,
    graph_of,
    set_attribute,
)
from sdflow.artifact import CONFIG_FILE, INDEX_FILE
from sdflow.manifest import MANIFEST_FILE
from sdflow.onnx_model.files import is_external


def _size(chance: Chance, least: float, most: float) -> float:
    """Between these, evenly on a logarithmic scale."""
    return float(np.exp(chance.uniform(np.log(least), np.log(most))))


# In a graph


def epsilon(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    types = ("LayerNormalization", "SkipLayerNormalization", "GroupNorm", "SkipGroupNorm", "InstanceNormalization")
    if not (found := graph.nodes(*types)):
        return None
    chosen = found if chance.random() < 0.3 else [chance.choice(found)]
    factor = _size(chance, 3, 1000)
    for node in chosen:
        set_attribute(node, "epsilon", float(get_attribute(node, "epsilon", 1e-5)) * factor)
    graph.save()
    return f"{graph.submodel}: epsilon of {len(chosen)} norms times {factor:.3g}"


def attention_scale(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    if not (found := graph.nodes("MultiHeadAttention", "Attention")):
        return None
    node, factor = chance.choice(found), 1 + _size(chance, 0.01, 0.5) * chance.choice([-1, 1])
    config = json.loads((folder.path / graph.submodel / CONFIG_FILE).read_text())
    heads = int(get_attribute(node, "num_heads"))
    width = config.get("hidden_size") or _width_of(graph, node)
    if not width:
        return None
    set_attribute(node, "scale", factor * float(get_attribute(node, "scale", 0.0) or (width / heads) ** -0.5))
    graph.save()
    return f"{graph.submodel}: scale of {node.name} times {factor:.4f}"


def _width_of(graph: Graph, node: Any) -> int | None:
    producers = {name: each for each in graph.graph.node for name in each.output}
    tensors = {tensor.name: tensor for tensor in graph.graph.initializer}
    weights = [tensors[name] for name in producers[node.input[0]].input if name in tensors] if node.input else []
    return next((int(tensor.dims[-1]) for tensor in weights if len(tensor.dims) == 2), None)


def activation(folder: Folder, chance: Chance) -> str | None:
    """Another activation: Gelu by tanh, another factor of QuickGelu, a SiLU that is missing."""
    graph = graph_of(folder, chance)
    found = [*graph.nodes("Gelu", "FastGelu", "QuickGelu", "Sigmoid")]
    found += [node for node in graph.nodes("GroupNorm", "SkipGroupNorm") if get_attribute(node, "activation")]
    if not found:
        return None
    node = chance.choice(found)
    same = [each for each in found if each.op_type == node.op_type]
    chosen = same if chance.random() < 0.4 else [node]
    alpha = 1.702 * (1 + _size(chance, 0.002, 0.2))
    for each in chosen:
        if each.op_type == "QuickGelu":
            set_attribute(each, "alpha", alpha)
        elif each.op_type in ("Gelu", "FastGelu"):
            each.op_type = {"Gelu": "FastGelu", "FastGelu": "Gelu"}[each.op_type]
        elif each.op_type == "Sigmoid":
            each.op_type = "HardSigmoid"
        else:
            set_attribute(each, "activation", 0)
    graph.save()
    return f"{graph.submodel}: activation of {len(chosen)} {node.op_type}"


def group_count(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    if not (
        found := [node for node in graph.nodes("GroupNorm", "SkipGroupNorm") if get_attribute(node, "groups", 1) > 1]
    ):
        return None
    node = chance.choice(found)
    set_attribute(node, "groups", get_attribute(node, "groups") // 2)
    graph.save()
    return f"{graph.submodel}: half the groups of {node.name}"


def _floats(graph: Graph) -> list[str]:
    """Values of floating point that are read, by what puts them out: products, convolutions, norms, sums."""
    types = ("MatMul", "Gemm", "Conv", "NhwcConv", "GroupNorm", "SkipGroupNorm", "LayerNormalization", "Add")
    types += ("SkipLayerNormalization", "MultiHeadAttention", "Attention")
    known, read = graph.types(), {name for node in graph.graph.node for name in node.input}
    values = [node.output[0] for node in graph.nodes(*types)]
    return [name for name in values if known.get(name, 0) in FLOATS and name in read]


def _element(graph: Graph, value: str) -> Any:
    return FLOATS[graph.type_of(value)]


def scaled(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    if not (found := _floats(graph)):
        return None
    value, factor = chance.choice(found), 1 + _size(chance, 0.002, 0.2) * chance.choice([-1, 1])
    graph.behind(value, "Mul", np.array(factor, _element(graph, value)))
    graph.save()
    return f"{graph.submodel}: {value} times {factor:.4f}"


def shifted(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    if not (found := _floats(graph)):
        return None
    value, by = chance.choice(found), _size(chance, 0.001, 0.3)
    graph.behind(value, "Add", np.array(by, _element(graph, value)))
    graph.save()
    return f"{graph.submodel}: {value} plus {by:.4f}"


def clipped(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    if not (found := _floats(graph)):
        return None
    value, limit = chance.choice(found), _size(chance, 0.5, 50)
    graph.behind(value, "Clip", *(np.array(each, _element(graph, value)) for each in (-limit, limit)))
    graph.save()
    return f"{graph.submodel}: {value} clipped to {limit:.3g}"


def coarse(folder: Folder, chance: Chance) -> str | None:
    """A value in bfloat16, as a careless conversion leaves it."""
    graph = graph_of(folder, chance)
    if not (found := _floats(graph)):
        return None
    value = chance.choice(found)
    kind = graph.type_of(value)
    graph.behind(value, "Cast", to=TensorProto.BFLOAT16)
    middle = f"{value}/bfloat16"
    graph.graph.node[-1].output[0] = middle
    graph.graph.node.append(helper.make_node("Cast", [middle], [f"{value}/changed"], f"{value}/back", to=kind))
    graph.save()
    return f"{graph.submodel}: {value} in bfloat16"


def sum_dropped(folder: Folder, chance: Chance) -> str | None:
    """A sum that forgets a part: a bias, or the connection past a block."""
    graph = graph_of(folder, chance)
    floats = {*_floats(graph)}
    found = [node for node in graph.nodes("Add") if node.output[0] in floats]
    if not found:
        return None
    node = chance.choice(found)
    kept = node.input[chance.randrange(2)]
    if kept in {tensor.name for tensor in graph.graph.initializer}:
        kept = next(name for name in node.input if name != kept)
    graph.reread({node.output[0]: kept})
    graph.graph.node.remove(node)
    graph.save()
    return f"{graph.submodel}: {node.name} keeps {kept} alone"


def inputs_exchanged(folder: Folder, chance: Chance) -> str | None:
    """Two weights of one shape and type, each in the place of the other."""
    graph = graph_of(folder, chance)
    alike: dict[Any, list[str]] = {}
    for tensor in graph.graph.initializer:
        if tensor.data_type in FLOATS and len(tensor.dims):
            alike.setdefault((tensor.data_type, *tensor.dims), []).append(tensor.name)
    if not (found := [names for names in alike.values() if len(names) > 1]):
        return None
    one, other = chance.sample(chance.choice(found), 2)
    graph.reread({one: other, other: one})
    graph.save()
    return f"{graph.submodel}: {one} and {other} exchanged"


def timestep(folder: Folder, chance: Chance) -> str | None:
    graph = graph_among(folder, chance, ["unet"])
    if graph is None:
        return None
    how = chance.choice(["clipped above", "clipped below", "whole", "moved"])
    if how == "clipped above":
        limit = chance.uniform(900, 998)
        graph.behind("timestep", "Min", np.array(limit, np.float32))
    elif how == "clipped below":
        limit = chance.uniform(1, 30)
        graph.behind("timestep", "Max", np.array(limit, np.float32))
    elif how == "whole":
        limit = 0
        graph.behind("timestep", "Floor")
    else:
        limit = _size(chance, 0.05, 2)
        graph.behind("timestep", "Add", np.array(limit, np.float32))
    graph.save()
    return f"unet: timestep {how} {limit:.3g}"


def sinusoids(folder: Folder, chance: Chance) -> str | None:
    graph = graph_among(folder, chance, ["unet"])
    if graph is None or not graph.nodes("Sin"):
        return None
    angle = graph.nodes("Sin")[0].input[0]
    how = chance.choice(["exchanged", "angles in float16", "angles scaled"])
    if how == "exchanged":
        for node in graph.nodes("Sin", "Cos"):
            node.op_type = {"Sin": "Cos", "Cos": "Sin"}[node.op_type]
    elif how == "angles in float16":
        graph.behind(angle, "Cast", to=TensorProto.FLOAT16)
        graph.graph.node[-1].output[0] = f"{angle}/half"
        graph.graph.node.append(helper.make_node("Cast", [f"{angle}/half"], [f"{angle}/changed"], to=TensorProto.FLOAT))
    else:
        factor = 1 + _size(chance, 1e-4, 1e-2)
        how = f"angles times {factor:.5f}"
        graph.behind(angle, "Mul", np.array(factor, np.float32))
    graph.save()
    return f"unet: sinusoids: {how}"


def padding(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    found = [node for node in graph.nodes("Conv", "NhwcConv") if sum(get_attribute(node, "pads", []) or []) >= 4]
    if not found:
        return None
    node = chance.choice(found)
    set_attribute(node, "pads", [0, 0, 2, 2])
    graph.save()
    return f"{graph.submodel}: {node.name} pads on one side"


def resize(folder: Folder, chance: Chance) -> str | None:
    graph = graph_of(folder, chance)
    if not (found := graph.nodes("Resize")):
        return None
    node = chance.choice(found)
    set_attribute(node, "mode", "linear")
    graph.save()
    return f"{graph.submodel}: {node.name} interpolates"


def text_mask(folder: Folder, chance: Chance) -> str | None:
    graph = graph_among(folder, chance, [name for name in folder.submodels if name.startswith("text_encoder")])
    if graph is None or not (
        found := [node for node in graph.nodes("Attention") if get_attribute(node, "unidirectional")]
    ):
        return None
    node = chance.choice(found)
    set_attribute(node, "unidirectional", 0)
    graph.save()
    return f"{graph.submodel}: {node.name} sees what comes later"


def constant(folder: Folder, chance: Chance) -> str | None:
    """A number of floating point that the graph has of its own."""
    graph = graph_of(folder, chance)
    found = [node for node in graph.nodes("Constant") if node.attribute[0].t.data_type in FLOATS]
    found = [node for node in found if np.any(numpy_helper.to_array(node.attribute[0].t))]
    if not found:
        return None
    tensor, factor = (node := chance.choice(found)).attribute[0].t, 1 + _size(chance, 0.001, 0.3)
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array((values * factor).astype(values.dtype)))
    graph.save()
    return f"{graph.submodel}: constant {node.output[0]} times {factor:.4f}"


# In the weights


def _weights(folder: Folder, chance: Chance, change: Callable[[np.ndarray], np.ndarray], what: str) -> str | None:
    graph = graph_of(folder, chance)
    found = [tensor for tensor in graph.graph.initializer if tensor.data_type in FLOATS and is_external(tensor)]
    tensor = chance.choice(found)
    values = graph.weights_of(tensor)
    before = np.array(values)
    values[...] = change(before.copy()).astype(before.dtype)
    values.flush()
    return None if np.array_equal(values, before) else f"{graph.submodel}: {tensor.name} {what}"


def weight_scaled(folder: Folder, chance: Chance) -> str | None:
    factor = 1 + _size(chance, 0.001, 0.2)
    return _weights(folder, chance, lambda values: values * factor, f"times {factor:.4f}")


def weight_bit(folder: Folder, chance: Chance) -> str | None:
    def flip(values: np.ndarray) -> np.ndarray:
        bits = values.view(f"u{values.itemsize}").reshape(-1)
        bits[chance.randrange(bits.size)] ^= bits.dtype.type(1 << chance.randrange(8 * values.itemsize - 1))
        return values

    return _weights(folder, chance, flip, "with one bit flipped")


def weight_coarse(folder: Folder, chance: Chance) -> str | None:
    def coarse_values(values: np.ndarray) -> np.ndarray:
        step = np.abs(values).max() / 127
        return np.round(values.astype(np.float32) / step) * step

    return _weights(folder, chance, coarse_values, "as of 8 bits")


def weight_zero(folder: Folder, chance: Chance) -> str | None:
    return _weights(folder, chance, np.zeros_like, "all zero")


def weight_rolled(folder: Folder, chance: Chance) -> str | None:
    return _weights(folder, chance, lambda values: np.roll(values, 1, axis=0), "moved by one row")


# Beside the graphs


def tokenizer_words(folder: Folder, chance: Chance) -> str | None:
    names = [each.parent.name for each in folder.path.glob("tokenizer*/vocab.json")]
    if not names:
        return None
    name = chance.choice(names)
    words = sorted(json.loads((folder.path / name / "vocab.json").read_text(encoding="utf-8")))
    one, other = chance.sample(words, 2)

    def exchange(vocabulary: dict[str, int]) -> None:
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    change_json(folder, f"{name}/vocab.json", exchange)
    if (folder.path / name / "tokenizer.json").exists():
        change_json(folder, f"{name}/tokenizer.json", lambda whole: exchange(whole["model"]["vocab"]))
    return f"{name}: the ids of {one!r} and {other!r} exchanged"


def tokenizer_merge(folder: Folder, chance: Chance) -> str | None:
    names = [each.parent.name for each in folder.path.glob("tokenizer*/merges.txt")]
    if not names:
        return None
    name = chance.choice(names)
    path = folder.writable(f"{name}/merges.txt")
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) < 3:
        return None
    place = chance.randrange(1, len(lines))
    gone = lines.pop(place)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if (folder.path / name / "tokenizer.json").exists():
        change_json(folder, f"{name}/tokenizer.json", lambda whole: whole["model"]["merges"].pop(place - 1))
    return f"{name}: the merge {gone!r} removed"


def _number(folder: Folder, name: str, chance: Chance, keys: Sequence[str] | None = None) -> str | None:
    found = json.loads((folder.path / name).read_text())
    numbers = [key for key, value in found.items() if type(value) in (int, float) and (keys is None or key in keys)]
    if not numbers:
        return None
    key = chance.choice(numbers)
    before = found[key]
    after = before + chance.choice([-1, 1]) if isinstance(before, int) else before * (1 + _size(chance, 0.01, 0.5))
    change_json(folder, name, lambda value: value.update({key: after}))
    return f"{name}: {key} {before} -> {after}"


def scheduler(folder: Folder, chance: Chance) -> str | None:
    return _number(folder, "scheduler/scheduler_config.json", chance)


def config(folder: Folder, chance: Chance) -> str | None:
    submodel = chance.choice(folder.submodels)
    folder.own(submodel)
    return _number(folder, f"{submodel}/{CONFIG_FILE}", chance)


def scaling_factor(folder: Folder, chance: Chance) -> str | None:
    names = [name for name in folder.submodels if name.startswith("vae")]
    if not names:
        return None
    name = chance.choice(names)
    folder.own(name)
    return _number(folder, f"{name}/{CONFIG_FILE}", chance, ["scaling_factor", "shift_factor"])


def class_name(folder: Folder, chance: Chance) -> str | None:
    index = json.loads((folder.path / INDEX_FILE).read_text())
    keys = [key for key, value in index.items() if isinstance(value, list) and value[0]]
    key = chance.choice(keys)
    change_json(folder, INDEX_FILE, lambda value: value.update({key: [value[key][0], f"{value[key][1]}2"]}))
    return f"{INDEX_FILE}: another class of {key}"


def index_entry(folder: Folder, chance: Chance) -> str | None:
    index = json.loads((folder.path / INDEX_FILE).read_text())
    key = chance.choice([key for key, value in index.items() if isinstance(value, list) and value[0]])
    change_json(folder, INDEX_FILE, lambda value: value.pop(key))
    return f"{INDEX_FILE}: no {key}"


def removed(folder: Folder, chance: Chance) -> str | None:
    files = [each for each in sorted(folder.path.rglob("*")) if each.is_file() and each.name != MANIFEST_FILE]
    path = chance.choice(files)
    path.unlink()
    return f"{path.relative_to(folder.path).as_posix()} removed"


def submodel_removed(folder: Folder, chance: Chance) -> str | None:
    path = folder.path / chance.choice(folder.submodels)
    path.unlink() if path.is_symlink() else shutil.rmtree(path)
    return f"{path.name} removed"


KINDS: Mapping[str, Callable[[Folder, Chance], str | None]] = {
    each.__name__: each
    for each in (
        epsilon, attention_scale, activation, group_count, scaled, shifted, clipped, coarse, sum_dropped, inputs_exchanged,
        timestep, sinusoids, padding, resize, text_mask, constant,
        weight_scaled, weight_bit, weight_coarse, weight_zero, weight_rolled,
        tokenizer_words, tokenizer_merge, scheduler, config, scaling_factor, class_name, index_entry, removed,
        submodel_removed,
    )
}  # fmt: skip
