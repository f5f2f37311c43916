"""A pipeline folder that `mutations.py` may damage: a copy of the changed files, and its graphs with editing methods."""

from __future__ import annotations

import filecmp
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.digest import FileEntry, digest_file, digest_tree
from sdflow.manifest import MANIFEST_FILE
from sdflow.onnx_model.files import data_span

Chance = random.Random
FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}


class Folder:
    """A copy of a pipeline folder that is to be damaged. What is not damaged stays a link to the cache."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = path
        shutil.copytree(source, path, symlinks=True)
        for link in [each for each in path.iterdir() if each.is_symlink()]:
            target = (source / link.name).resolve()
            link.unlink()
            link.symlink_to(target)
        self.submodels = [each.name for each in sorted(path.iterdir()) if (each / MODEL_FILE).is_file()]
        self.touched: str | None = None
        self.source = source

    def own(self, submodel: str) -> Path:
        """The submodel's folder, copied so that it can be changed."""
        folder = self.path / submodel
        if folder.is_symlink():
            target = folder.resolve()
            folder.unlink()
            shutil.copytree(target, folder)
        for path in folder.rglob("*"):
            path.chmod(0o644 if path.is_file() else 0o755)
        self.touched = submodel
        return folder

    def writable(self, name: str) -> Path:
        """A file beside the graphs."""
        path = self.path / name
        path.chmod(0o644)
        return path

    def graph_differs(self) -> bool:
        """Whether the touched submodel's graph or weights are others than before."""
        if self.touched is None:
            return False
        pairs = [
            (self.source / self.touched / name, self.path / self.touched / name) for name in (MODEL_FILE, WEIGHTS_FILE)
        ]
        return not all(
            other.exists() and filecmp.cmp(one, other, shallow=False) for one, other in pairs if one.exists()
        )

    def sign(self) -> None:
        """Write the digests of what is there, as whoever built it so would have: no fault is found by its digest."""
        path = self.writable(MANIFEST_FILE)
        manifest = json.loads(path.read_text())
        for name, part in manifest["submodels"].items():
            folder = self.path / name
            if folder.is_symlink() or not folder.is_dir():
                continue
            files = sorted(each for each in folder.rglob("*") if each.is_file())
            entries = [
                FileEntry(each.relative_to(folder).as_posix(), each.stat().st_size, digest_file(each)) for each in files
            ]
            part["files"] = [{"path": each.path, "bytes": each.size, "sha256": each.sha256} for each in entries]
            part["artifact"] = digest_tree(entries)
        path.write_text(json.dumps(manifest, indent=2))


class Graph:
    """A submodel's graph, its weights still in their file."""

    def __init__(self, folder: Folder, submodel: str) -> None:
        self.folder, self.submodel = folder, submodel
        self.proto = onnx.load(str(folder.path / submodel / MODEL_FILE), load_external_data=False)
        self.graph = self.proto.graph

    def nodes(self, *types: str) -> list[Any]:
        return [node for node in self.graph.node if node.op_type in types]

    def save(self) -> None:
        path = self.folder.own(self.submodel) / MODEL_FILE
        path.write_bytes(self.proto.SerializeToString(deterministic=True))

    def type_of(self, value: str) -> int:
        """Of a value, as the graph declares it; 0 where it does not."""
        return self.types().get(value, 0)

    def types(self) -> dict[str, int]:
        return {item.name: item.type.tensor_type.elem_type for item in (*self.graph.value_info, *self.graph.output)}

    def behind(self, value: str, op_type: str, *constants: np.ndarray, **attributes: Any) -> None:
        """Put a node behind a value: whoever read the value reads the node's output."""
        new = f"{value}/changed"
        self.reread({value: new})
        names = []
        for index, array in enumerate(constants):
            names.append(f"{new}/{index}")
            self.graph.node.append(helper.make_node("Constant", [], names[-1:], value=numpy_helper.from_array(array)))
        self.graph.node.append(helper.make_node(op_type, [value, *names], [new], f"{new}/{op_type}", **attributes))

    def read(self, value: str) -> bool:
        return any(value in node.input for node in self.graph.node)

    def reread(self, instead: Mapping[str, str]) -> None:
        """Whoever read a value reads the other one instead."""
        for node in self.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = instead.get(name, name)

    def weights_of(self, tensor: TensorProto) -> np.ndarray:
        """A tensor of the file of weights, mapped: what is written there is in the file after `flush`."""
        data = self.folder.own(self.submodel) / WEIGHTS_FILE
        return np.memmap(data, FLOATS[tensor.data_type], "r+", data_span(tensor)[1], tuple(tensor.dims))


def graph_of(folder: Folder, chance: Chance) -> Graph:
    """That of any submodel."""
    return Graph(folder, chance.choice(folder.submodels))


def graph_among(folder: Folder, chance: Chance, submodels: Sequence[str]) -> Graph | None:
    """That of any of these which the folder has."""
    there = [name for name in submodels if name in folder.submodels]
    return Graph(folder, chance.choice(there)) if there else None


def set_attribute(node: Any, name: str, value: Any) -> Any:
    """Set an attribute; returns what it was, or None."""
    before = None
    for item in list(node.attribute):
        if item.name == name:
            before = helper.get_attribute_value(item)
            node.attribute.remove(item)
    node.attribute.append(helper.make_attribute(name, value))
    return before


def get_attribute(node: Any, name: str, default: Any = None) -> Any:
    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


def change_json(folder: Folder, name: str, change: Callable[[Any], None]) -> None:
    path = folder.writable(name)
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
