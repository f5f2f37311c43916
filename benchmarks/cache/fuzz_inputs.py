"""Mutations of untrusted inputs: JSON, bytes, safetensors files, ONNX graphs. Each is a function of a random source."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2.5, 1e-300, 1e308, float("nan"), float("inf"), 10**6, 10**12, 10**30, "", "x", "0",
    "y" * 10_000, "..", "../../x", "/etc/passwd", "a\0b", "\ud800", "cpu", "hf:a/b", [], {}, [[]], {"a": 1}, [1, 2], [16, 16],
    ["x"], {"": None}, {"x": [{"y": {}}]},
)  # fmt: skip
"""What stands in place of what belongs there."""

DEEP = "@deep@"
"""Stands for what is nested too deeply, until it is written."""


def odd(chance: random.Random) -> Any:
    """A value that does not belong there."""
    if chance.random() < 0.02:
        return DEEP
    return copy.deepcopy(chance.choice(ODD))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a tree of JSON, but the tree itself."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        found += [(*path, key), *places(each, (*path, key))]
    return found


def mutated_tree(tree: Any, chance: random.Random) -> Any:
    """A copy with one to three changes: other values, keys that went, were renamed, or exchanged their values."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 2, 3))):
        found = places(tree)
        if not found:
            return odd(chance)
        *above, key = chance.choice(found)
        holder = tree
        for step in above:
            holder = holder[step]
        what = chance.randrange(6)
        if what <= 2:
            holder[key] = odd(chance)
        elif what == 3:
            del holder[key]
        elif what == 4 and isinstance(holder, dict):
            holder[str(odd(chance))[:5000]] = holder.pop(key)
        else:
            other = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
    return tree


def as_json(tree: Any) -> bytes:
    """JSON as Python writes it: with NaN, and half characters as they are."""
    return json.dumps(tree).encode().replace(f'"{DEEP}"'.encode(), b"[" * 5000 + b"]" * 5000)


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    """A copy with bits flipped, parts cut, doubled, exchanged or put in."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, more = chance.randrange(len(data) + 1), chance.randrange(1, 64)
        what = chance.randrange(6)
        if what == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif what == 1:
            del data[at:]
        elif what == 2:
            del data[at : at + more]
        elif what == 3:
            data[at:at] = data[at : at + more]
        elif what == 4:
            data[at:at] = chance.randbytes(more)
        else:
            data[at : at + 8] = struct.pack("<Q", chance.choice((0, 1, 2**31, 2**63, 2**64 - 1)))
    return bytes(data)


def safetensors_header(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file and the bytes behind it."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def mutated_safetensors(content: bytes, chance: random.Random) -> bytes:
    """Another header before the same data, or other bytes."""
    if chance.random() < 0.3:
        return mutated_bytes(content, chance)
    header, data = safetensors_header(content)
    length = chance.choice((None, None, None, None, 0, 2**40, 2**64 - 1))
    return with_header(as_json(mutated_tree(header, chance)), data, length)


def mutated_lora(
    tensors: dict[str, Any], metadata: dict[str, str], chance: random.Random
) -> tuple[dict[str, Any], dict[str, str]]:
    """Names, shapes, values and metadata of a LoRA (numpy arrays) changed, most of them so that it may still be one."""
    import numpy as np

    tensors, metadata = dict(tensors), dict(metadata)
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choice(sorted(tensors))
        what, value = chance.randrange(9), tensors[name]
        if what == 0:
            del tensors[name]
            if not tensors:
                tensors["x"] = np.zeros(1, np.float32)
        elif what == 1:
            tensors[str(odd(chance)).replace("\ud800", "?")[:5000]] = tensors.pop(name)
        elif what == 2:
            other = chance.choice(sorted(tensors))
            tensors[name], tensors[other] = tensors[other], value
        elif what == 3:
            tensors[name] = value.astype(chance.choice((np.float16, np.float64, np.int32, np.float32)))
        elif what == 4 and value.size:
            changed = value.astype(np.float32).reshape(-1).copy()
            changed[chance.randrange(changed.size)] = chance.choice((np.nan, np.inf, 1e30, 0, -1, 3))
            tensors[name] = changed.reshape(value.shape)
        elif what == 5:  # another alpha; alphas of layers that had none
            stem = name.partition(".lora_")[0].removesuffix(".alpha")
            tensors[f"{stem}.alpha"] = np.array(chance.choice((0.5, 1, 2, 3, 8, -1)), np.float32)
        elif what == 6 and value.ndim >= 2:
            tensors[name] = value[chance.randrange(len(value)) :] if chance.random() < 0.5 else value[..., :1].copy()
        elif what == 7:
            for each in [key for key in tensors if key.startswith(name.partition(".")[0])]:
                tensors.pop(each)
            if not tensors:
                tensors["x"] = np.zeros(1, np.float32)
        else:
            metadata[chance.choice((*metadata, "x", "lora_adapter_metadata"))] = str(odd(chance)).replace("\ud800", "?")
    if "lora_adapter_metadata" in metadata and chance.random() < 0.7:
        try:
            tree = mutated_tree(json.loads(metadata["lora_adapter_metadata"]), chance)
            metadata["lora_adapter_metadata"] = as_json(tree).decode()
        except ValueError:
            pass
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}, metadata


def mutated_graph(content: bytes, chance: random.Random) -> bytes:
    """Bytes of an ONNX model, or its graph: names, types, shapes, where its data lie."""
    import onnx

    if chance.random() < 0.4:
        return mutated_bytes(content, chance)
    model = onnx.ModelProto.FromString(content)
    graph = model.graph
    for _ in range(chance.choice((1, 1, 2, 3))):
        what = chance.randrange(8)
        node = chance.choice(graph.node) if graph.node else None
        tensor = chance.choice(graph.initializer) if graph.initializer else None
        if what == 0 and node is not None and node.input:
            node.input[chance.randrange(len(node.input))] = chance.choice(("", "gone", "x" * 5000))
        elif what == 1 and node is not None:
            node.op_type = chance.choice(("", "If", "Gone", "Identity", "Reshape"))
        elif what == 2 and node is not None:
            graph.node.remove(node)
        elif what == 3 and tensor is not None:
            tensor.dims[:] = chance.choice(([], [0], [-1], [2**40], [2**62, 4], [1, 1]))
        elif what == 4 and tensor is not None:
            tensor.data_type = chance.choice((0, 1, 7, 10, 99))
        elif what == 5 and tensor is not None and tensor.external_data:
            entry = chance.choice(tensor.external_data)
            entry.value = chance.choice(
                ("", "-1", "x", str(2**63), "../../etc/passwd", "/etc/passwd", "config.json", ".")
            )
        elif what == 6 and graph.input:
            graph.input[0].name = chance.choice(("", "gone", graph.input[0].name))
        else:
            model.ir_version = chance.choice((0, 1, 10**6))
    return model.SerializeToString()
