"""Interleaving of four images with standard operators.

    x (N, H + 1, W + 1, 4 C)  ->  y (N, 2 H, 2 W, C)        y[2 i + a, 2 j + b] is x[i + a, j + b] of the channels' group 2 a + b

A Slice takes each phase (a, b); a Concat of channels joins the two of a row, (N, H, W, 2 C), and a Concat of columns
the two rows, (N, H, 2 W, 2 C), which has y's memory layout. `SubpixelConv` writes this form. On CUDA it takes six times
the memory traffic of a copy, so sessions replace it by sdflow's operator `INTERLEAVE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

INTERLEAVE = "InterleavePhases"
"""Maps (N, H + 1, W + 1, 4 C) to (N, 2 H, 2 W, C), in the domain sdflow."""

PHASES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row and column of each channel group."""


def interleaved(name: str, value: str, result: str, channels: int, constant: Callable[[str, Any], str]) -> list[Any]:
    """Return nodes that compute `result` from `value`. name: prefix of their names. channels: C. constant: creates
    initializers."""
    import numpy as np
    from onnx import helper

    axes = constant("phase_axes", np.array([1, 2, 3], np.int64))
    times = constant("phase_times", np.array([1, 2, 2, 1], np.int64))
    nodes, taken = [], [f"{name}/phase{row}{column}" for row, column in PHASES]
    for phase, each in enumerate(taken):
        window = [
            constant(f"phase{phase}_{end}_{channels}", np.array(values, np.int64))
            for end, values in zip(("starts", "ends"), _window(phase, channels), strict=True)
        ]
        nodes.append(helper.make_node("Slice", [value, *window, axes], [each], f"{each}/Slice"))
    rows = [f"{name}/row{row}" for row in range(2)]
    together, shape, larger = (f"{name}/{part}" for part in ("rows", "shape", "larger"))
    return [
        *nodes,
        helper.make_node("Concat", taken[:2], [rows[0]], f"{rows[0]}/Concat", axis=3),
        helper.make_node("Concat", taken[2:], [rows[1]], f"{rows[1]}/Concat", axis=3),
        helper.make_node("Concat", rows, [together], f"{name}/Concat", axis=2),
        helper.make_node("Shape", [taken[0]], [shape], f"{name}/Shape"),
        helper.make_node("Mul", [shape, times], [larger], f"{name}/Mul"),
        helper.make_node("Reshape", [together, larger], [result], f"{name}/Reshape"),
    ]


def _window(phase: int, channels: int) -> tuple[list[int], list[int]]:
    """Return start and end of a phase: rows, columns, channels."""
    last = (-1, (1 << 63) - 1)  # without or with the last one
    row, column = PHASES[phase]
    return [row, column, phase * channels], [last[row], last[column], (phase + 1) * channels]


@dataclass(frozen=True)
class Interleaving:
    """An occurrence of `interleaved` in a graph. nodes: indices of its nodes, the Reshape last."""

    value: str
    result: str
    nodes: tuple[int, ...]


def interleavings(graph: Any, shapes: Mapping[str, list[int]]) -> Iterator[Interleaving]:
    """Find occurrences in a graph with known shapes (from `specialize`) whose inner values have no other readers."""
    producers = {name: place for place, node in enumerate(graph.node) for name in node.output}
    reads = Counter(name for node in graph.node for name in node.input)
    reads.update(item.name for item in graph.output)
    constants = {tensor.name: tensor for tensor in graph.initializer}

    def before(places: Iterable[int], op_type: str, **attributes: int) -> list[int]:
        """Return the indices of producers of this type whose output these nodes alone read."""
        names = [name for place in places for name in graph.node[place].input if name in producers and reads[name] == 1]
        made_by = [(producers[name], graph.node[producers[name]]) for name in names]
        return [
            place
            for place, node in made_by
            if _is_plain(node, op_type) and {item.name: item.i for item in node.attribute} == attributes
        ]

    for place, node in enumerate(graph.node):
        if not _is_plain(node, "Reshape"):
            continue
        together = before([place], "Concat", axis=2)
        rows = before(together, "Concat", axis=3)
        slices = before(rows, "Slice")
        values = {graph.node[each].input[0] for each in slices}
        if (len(together), len(rows), len(slices), len(values)) != (1, 2, 4, 1):
            continue
        (value,) = values
        shape = shapes.get(value, [])
        if len(shape) != 4 or shape[3] % 4:
            continue
        images, height, width, channels = shape[0], shape[1] - 1, shape[2] - 1, shape[3] // 4
        found = [_values(graph.node[each].input[1:], constants) for each in (*slices, place)]
        windows = [[*_window(phase, channels), [1, 2, 3]] for phase in range(4)]
        if found == [*windows, [[images, 2 * height, 2 * width, channels]]]:
            yield Interleaving(value, node.output[0], (*slices, *rows, *together, place))


def _is_plain(node: Any, op_type: str) -> bool:
    return bool(node.op_type == op_type and node.domain in ("", "ai.onnx"))


def _values(names: Any, constants: Mapping[str, Any]) -> list[list[int]]:
    """Return the values of integer constants; empty for anything else."""
    from onnx import numpy_helper

    return [numpy_helper.to_array(constants[name]).tolist() if name in constants else [] for name in names]
