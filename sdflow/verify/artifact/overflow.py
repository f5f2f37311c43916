"""How large activations become in an artifact: NaN, infinity, and values near float16's largest, by node and step.

What is measured is what nodes put out. Within a fused operator (the scores of attention) a target may use float16 too; that
is not seen here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.onnx_model.reading import load_graph
from sdflow.verify.lowering import Lowered, PieceSession, lower, session_of
from sdflow.verify.lowering.builder import FLOAT, FLOAT16

if TYPE_CHECKING:
    import numpy as np

LARGEST_FLOAT16 = 65504.0


@dataclass(frozen=True)
class NodeRange:
    """The range of one value over all steps.

    node, operator: name and type of the artifact's node that puts it out. value: its name. float16: whether it is stored
    so. largest: the largest magnitude that is not NaN, may be infinity; of what Softmax alone reads the largest positive
    number: the other end is where attention is masked, and e to it is 0 with any of these numbers. largest_step: the
    step where it is, from 0. nan_step: the first step with a NaN, None when there is none.
    """

    node: str
    operator: str
    value: str
    float16: bool
    largest: float
    largest_step: int
    nan_step: int | None

    def exceeds(self, fraction: float) -> bool:
        """Whether there is a NaN, an infinity or, in float16, a magnitude above `fraction` of float16's largest."""
        limit = fraction * LARGEST_FLOAT16 if self.float16 else math.inf
        return self.nan_step is not None or math.isinf(self.largest) or self.largest > limit


def ranges(
    model_path: Path,
    feeds: Iterable[Mapping[str, np.ndarray]],
    *,
    round_fp16: bool = True,
    threads: int = 0,
    most: int | None = None,
) -> list[NodeRange]:
    """The range of every floating-point value that the nodes of an artifact put out, in the order of the graph.

    model_path: its model.onnx. feeds: the inputs of each step, by name. round_fp16: without, values that float16 cannot
    hold keep their size instead of becoming infinite, and tell by how much it was too small. most: bytes of weights, as float32,
    that are in memory at a time; None: all of them.
    Raises VerificationError for an operator that cannot be lowered.
    """
    import numpy as np

    model = load_graph(model_path)
    operators = {name: node.op_type for node in model.graph.node for name in node.output}
    scores = _read_by_softmax_alone(model.graph)
    stored = {name: kind == FLOAT16 for name, kind in lower(model).values.items()} if not round_fp16 else None
    lowered = lower(model, round_fp16=round_fp16)
    names = [name for name, kind in lowered.values.items() if kind in (FLOAT, FLOAT16)]
    measured, outputs = _measured(lowered, names, scores), ["largest", "nan"]
    if most is None:
        session = session_of(measured, model_path.parent, threads=threads)
        steps = [session.run(outputs, dict(feed)) for feed in feeds]
    else:
        steps = PieceSession(measured, model_path.parent, most, threads).run_each([*feeds], outputs)
    largest, nan = (np.stack([step[index] for step in steps]) for index in (0, 1))
    return [
        NodeRange(
            node=lowered.node_of[name],
            operator=operators[name],
            value=name,
            float16=stored[name] if stored is not None else lowered.values[name] == FLOAT16,
            largest=float(largest[:, index].max()),
            largest_step=int(largest[:, index].argmax()),
            nan_step=int(nan[:, index].argmax()) if nan[:, index].any() else None,
        )
        for index, name in enumerate(names)
    ]


def _read_by_softmax_alone(graph: Any) -> set[str]:
    readers: dict[str, set[str]] = {item.name: {"output"} for item in graph.output}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    return {name for name, kinds in readers.items() if kinds == {"Softmax"}}


def _measured(lowered: Lowered, names: Sequence[str], scores: Collection[str]) -> Lowered:
    """The same graph with two outputs: of each value the largest magnitude, of scores the largest positive number, and
    whether there is a NaN.

    The measuring nodes stand right behind the node that puts the value out, so that no value is kept for longer than
    the graph itself needs it.
    """
    import numpy as np
    import onnx

    make = onnx.helper.make_node
    measure = set(names)
    nodes: list[Any] = []
    for node in lowered.model.graph.node:
        nodes.append(node)
        for name in node.output:
            if name in measure:
                at = f"{name}/range"
                wide = name
                if lowered.values[name] == FLOAT16:
                    wide = f"{at}/float32"
                    nodes.append(make("Cast", [name], [wide], f"{at}/Cast", to=FLOAT))
                nodes += [
                    make("IsNaN", [wide], [f"{at}/is_nan"], f"{at}/IsNaN"),
                    make("Relu" if name in scores else "Abs", [wide], [f"{at}/size"], f"{at}/Size"),
                    make("Where", [f"{at}/is_nan", "range/zero", f"{at}/size"], [f"{at}/number"], f"{at}/Where"),
                    make("ReduceMax", [f"{at}/number"], [f"{at}/most"], f"{at}/ReduceMax", keepdims=0),
                    make("Reshape", [f"{at}/most", "range/flat"], [f"{at}/largest"], f"{at}/Reshape"),
                    make("Cast", [f"{at}/is_nan"], [f"{at}/nan_as_float"], f"{at}/CastNaN", to=FLOAT),
                    make("ReduceMax", [f"{at}/nan_as_float"], [f"{at}/nan_any"], f"{at}/ReduceMaxNaN", keepdims=0),
                    make("Reshape", [f"{at}/nan_any", "range/flat"], [f"{at}/nan"], f"{at}/ReshapeNaN"),
                ]
    nodes.append(make("Concat", [f"{name}/range/largest" for name in names], ["largest"], "range/largest", axis=0))
    nodes.append(make("Concat", [f"{name}/range/nan" for name in names], ["nan"], "range/nan", axis=0))
    model = onnx.ModelProto()
    model.CopyFrom(lowered.model)
    graph = model.graph
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.float32), "range/zero"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1], np.int64), "range/flat"))
    for name in ("largest", "nan"):
        graph.output.append(onnx.helper.make_tensor_value_info(name, FLOAT, [len(names)]))
    ranges = {f"{name}/range/{which}": FLOAT for name in names for which in ("largest", "nan")}
    return Lowered(model, lowered.operators, lowered.node_of, {**lowered.values, **ranges})
