"""Map from initializers of an ONNX model to parameters of the PyTorch module.

OnnxConversion records it in `weights.json`, {initializer: {"key": ..., "shape": [...], "transform": [...]}}, for
LoraMerge: a LoRA names parameters by their `state_dict` keys. It is recorded while weights are folded, not inferred by
comparing values, so it is exact for any values.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdflow.artifact import MODEL_FILE, WEIGHTS_FILE
from sdflow.errors import PassError
from sdflow.onnx_model.facts import subgraphs
from sdflow.onnx_model.stub import is_stub
from sdflow.weights.stubs import make_stub

if TYPE_CHECKING:
    import numpy as np

WEIGHT_NAMES_FILE = "weights.json"


@dataclass(frozen=True)
class Transform:
    """A step from a parameter to an initializer: a permutation of its axes, or a reshape."""

    kind: Literal["transpose", "reshape"]
    axes: tuple[int, ...]

    def apply(self, values: np.ndarray) -> np.ndarray:
        return values.transpose(self.axes) if self.kind == "transpose" else values.reshape(self.axes)

    def undo(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Invert `apply`. shape: shape of the values before `apply`."""
        if self.kind == "reshape":
            return values.reshape(shape)
        return values.transpose([self.axes.index(axis) for axis in range(len(self.axes))])

    def shape_after(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in self.axes) if self.kind == "transpose" else self.axes


@dataclass(frozen=True)
class WeightName:
    """The parameter that an initializer holds: its state_dict key, its shape, and the steps that moved its values."""

    key: str
    shape: tuple[int, ...]
    transform: tuple[Transform, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The initializer's shape."""
        shape = self.shape
        for step in self.transform:
            shape = step.shape_after(shape)
        return shape

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Convert the parameter's values to the initializer's."""
        for step in self.transform:
            values = step.apply(values)
        return values

    def undo(self, values: np.ndarray) -> np.ndarray:
        """Convert the initializer's values to the parameter's."""
        shapes = [self.shape]
        for step in self.transform:
            shapes.append(step.shape_after(shapes[-1]))
        for step, shape in zip(reversed(self.transform), reversed(shapes[:-1]), strict=True):
            values = step.undo(values, shape)
        return values


def write_weight_names(names: Mapping[str, WeightName], out: Path) -> None:
    """Write `names` to `weights.json` in `out`."""
    content = {
        initializer: {
            "key": name.key,
            "shape": list(name.shape),
            "transform": [{step.kind: list(step.axes)} for step in name.transform],
        }
        for initializer, name in names.items()
    }
    (out / WEIGHT_NAMES_FILE).write_text(json.dumps(content, indent=1) + "\n")


def read_weight_names(model: Path) -> dict[str, WeightName]:
    """Read `weights.json` of the artifact `model`. Raises PassError if it is missing or malformed."""
    path = model / WEIGHT_NAMES_FILE
    remedy = f"{WEIGHT_NAMES_FILE} is written by OnnxConversion; passes that change weights must remove it."
    try:
        return {
            initializer: WeightName(
                entry["key"],
                tuple(entry["shape"]),
                tuple(Transform(kind, tuple(axes)) for step in entry["transform"] for kind, axes in step.items()),
            )
            for initializer, entry in json.loads(path.read_text()).items()
        }
    except FileNotFoundError:
        raise PassError("the previous step has no map from weights to parameters", remedy=remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise PassError(f"{WEIGHT_NAMES_FILE} is not readable: {cause!r}", remedy=remedy) from cause


def fold_weights(model: Any, folder: Path, keys: Container[str]) -> dict[str, WeightName]:
    """Fold operators that only move a weight's values (Transpose, Unsqueeze) into the weights of a ModelProto, in
    place.

    folder: directory of the data file. keys: the initializers that are parameters; they keep their names. Sizes do not
    change, so the data file is edited in place with one weight in memory at a time. A weight that is used in two
    different forms is unchanged. Returns the parameter behind each initializer and the operators that moved its values,
    in graph order.
    """
    graph = model.graph
    names = {}
    users = _users(graph)
    constants = _constants(graph)
    folded: set[str] = set()
    for tensor in graph.initializer:
        if tensor.name not in keys:
            continue
        shape, steps = tuple(tensor.dims), []
        while step := _common_step(users, tensor, constants):
            _apply(step, tensor, folder)
            steps.append(step)
            moves = users[tensor.name]
            folded.update(node.output[0] for node in moves)
            users[tensor.name] = [user for node in moves for user in users.get(node.output[0], ())]
            for user in users[tensor.name]:
                user.input[:] = [tensor.name if name in folded else name for name in user.input]
        names[tensor.name] = WeightName(tensor.name, shape, tuple(steps))
    _remove(graph, folded)
    return names


def weight_span(tensor: Any) -> tuple[int, int] | None:
    """Return an initializer's (offset, length) in the data file, in bytes; None if it is in the graph file."""
    import onnx

    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    span = {entry.key: entry.value for entry in tensor.external_data}
    if span["location"] != WEIGHTS_FILE:
        raise PassError(
            f"the weights of {tensor.name} lie in {span['location']}, not in {WEIGHTS_FILE}", where=MODEL_FILE
        )
    return int(span["offset"]), int(span["length"])


def _users(graph: Any) -> dict[str, list[Any]]:
    """Map each value to the nodes that read it. None marks a use that cannot change: in a subgraph, or as an output."""
    users: dict[str, list[Any]] = {output.name: [None] for output in graph.output}
    for inner in subgraphs(graph):
        for node in inner.node:
            for name in node.input:
                users.setdefault(name, []).append(node if inner is graph else None)
    return users


def _constants(graph: Any) -> dict[str, Any]:
    """Return the values of the graph's tensor Constants, such as the axes of an Unsqueeze."""
    import onnx

    return {
        node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t)
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }


def _common_step(users: Mapping[str, list[Any]], tensor: Any, constants: Mapping[str, Any]) -> Transform | None:
    """Return the one step by which all readers of `tensor` move its values, or None."""
    steps = set()
    for node in users.get(tensor.name, ()):
        movable = node is not None and node.input[0] == tensor.name and None not in users.get(node.output[0], ())
        steps.add(_step(node, tuple(tensor.dims), constants) if movable else None)
    return steps.pop() if len(steps) == 1 else None


def _step(node: Any, shape: tuple[int, ...], constants: Mapping[str, Any]) -> Transform | None:
    if node.op_type == "Transpose":
        reverse = tuple(reversed(range(len(shape))))
        return Transform("transpose", next((tuple(entry.ints) for entry in node.attribute), reverse))
    if node.op_type == "Unsqueeze" and node.input[1] in constants:
        axes = constants[node.input[1]].tolist()
        rank = len(shape) + len(axes)
        added = {axis % rank for axis in axes}
        old = iter(shape)
        return Transform("reshape", tuple(1 if index in added else next(old) for index in range(rank)))
    return None


def _apply(step: Transform, tensor: Any, folder: Path) -> None:
    """Apply `step` to the stored values of `tensor`."""
    import numpy as np
    import onnx

    values = onnx.numpy_helper.to_array(tensor, str(folder))
    if is_stub(tensor):
        from sdflow.weights.symbol import recipe_of

        make_stub(tensor, recipe_of(step.apply(values)))
        return
    moved = np.ascontiguousarray(step.apply(values))
    span = weight_span(tensor)
    if span is None:
        tensor.raw_data = moved.tobytes()
    elif step.kind == "transpose":
        with (folder / WEIGHTS_FILE).open("r+b") as data:
            data.seek(span[0])
            data.write(moved.data)
    tensor.dims[:] = moved.shape


def _remove(graph: Any, folded: Container[str]) -> None:
    """Remove the nodes whose output is in `folded`, Constants that only they read, and the value infos of both.

    Value infos of initializers are removed too: they repeat shapes, which have changed for folded ones.
    """
    read = {output.name for output in graph.output}
    for inner in subgraphs(graph):
        read.update(name for node in inner.node if node.output[0] not in folded for name in node.input)
    gone = {tensor.name for tensor in graph.initializer}
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.output[0] in folded or (node.op_type == "Constant" and node.output[0] not in read):
            gone.add(node.output[0])
            del graph.node[index]
    for index in reversed(range(len(graph.value_info))):
        if graph.value_info[index].name in gone:
            del graph.value_info[index]
