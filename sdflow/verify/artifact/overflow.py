"""Find the nodes of a float16 artifact whose values approach or exceed float16's range along the trajectory.

Outputs of nodes are measured without rounding to float16, so that the first overflow is not hidden by the NaN that it
causes. A target may also use float16 inside a fused operator (the scores of attention), which this cannot see.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sdflow.artifact import MODEL_FILE
from sdflow.onnx_model.reading import load_graph
from sdflow.verify.finding import Finding
from sdflow.verify.lowering import Lowered, PieceSession, lower, session_of
from sdflow.verify.lowering.builder import FLOAT, FLOAT16
from sdflow.verify.reference.cases import Cases

LARGEST_FLOAT16 = 65504.0
NEAR = 0.5
"""Share of float16's largest number from which a value is worth a warning: another seed may go further."""
NAMED = 10


@dataclass(frozen=True)
class Overflow:
    """The values of an artifact that leave float16's range, or come near its limits.

    findings: nodes whose values leave float16's range, as errors, or come near, as warnings; the largest first.

    suspects: names of the nodes that output or read a value out of range, in the order of the graph.
    """

    findings: Sequence[Finding] = ()
    suspects: Sequence[str] = ()


@dataclass(frozen=True)
class NodeRange:
    """The range of one value over all steps.

    node, operator: name and type of the artifact's node that outputs it. value: its name. largest: the largest
    magnitude that is not NaN; for values that only Softmax reads, the largest positive number, since masked attention
    scores are hugely negative and e to any of them is 0. largest_step: its step, from 0. nan_step: the first step with
    a NaN.
    """

    node: str
    operator: str
    value: str
    largest: float
    largest_step: int
    nan_step: int | None

    def exceeds(self, fraction: float) -> bool:
        """Whether there is a NaN, or a magnitude above `fraction` of float16's largest."""
        return self.nan_step is not None or self.largest > fraction * LARGEST_FLOAT16


def overflow(submodel: str, folder: Path, cases: Cases, *, threads: int = 0, most: int | None = None) -> Overflow:
    """Find an artifact's values beyond or near float16's range. most: see `open_graph`.

    Raises VerificationError if the graph cannot be lowered.
    """
    import onnx

    path = (folder / MODEL_FILE).resolve()
    graph = load_graph(path).graph
    types = {port.name: onnx.helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type) for port in graph.input}
    chosen = [index for index, case in cases if case.group in ("trajectory", "prompt")]
    feeds = [
        {name: value.astype(types[name]) for name, value in cases.get(index, "inputs").items()} for index in chosen
    ]
    measured = [each for each in ranges(path, feeds, threads=threads, most=most) if each.exceeds(NEAR)]
    measured.sort(key=lambda each: (each.nan_step is None, -each.largest))
    large = {each.value for each in measured if each.exceeds(1.0)}
    suspects = [node.name for node in graph.node if large.intersection((*node.input, *node.output))]
    names = [cases.cases[index].name for index in chosen]
    return Overflow([_finding(submodel, each, names, ", ".join(suspects)) for each in measured[:NAMED]], suspects)


def _finding(submodel: str, found: NodeRange, cases: Sequence[str], overflowing: str) -> Finding:
    value, step = (f"{found.largest:.3g}", found.largest_step) if found.nan_step is None else ("NaN", found.nan_step)
    what = f"{found.operator} gives {value} at {cases[step]}; float16 ends at {LARGEST_FLOAT16:.0f}"
    if not found.exceeds(1.0):
        remedy = f"If another seed overflows: add {found.node} to OnnxFloatToFloat16's node_block_list"
        return Finding(submodel, "overflow", "warning", found.node, what, remedy)
    remedy = (
        f"Keep the nodes that output or read it in fp32: add {overflowing} to OnnxFloatToFloat16's node_block_list "
        "(sdflow verify --fix finds the smallest list that passes), or use weights made for fp16"
    )
    return Finding(submodel, "overflow", "error", found.node, what, remedy)


def ranges(
    model_path: Path, feeds: Iterable[Mapping[str, np.ndarray]], *, threads: int = 0, most: int | None = None
) -> list[NodeRange]:
    """The range of every float16 value that the artifact's nodes output, in the order of the graph.

    model_path: its model.onnx. feeds: each step's inputs, by name. most: see `overflow`.
    Raises VerificationError for an operator that cannot be lowered.
    """
    model = load_graph(model_path)
    operators = {name: node.op_type for node in model.graph.node for name in node.output}
    names = [name for name, kind in lower(model).values.items() if kind == FLOAT16]
    lowered = lower(model, round_fp16=False)
    measured, outputs = _measured(lowered, names, _read_by_softmax_alone(model.graph)), ["largest", "nan"]
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
    """The same graph with two outputs: for each value the largest magnitude (for scores the largest positive number),
    and whether there is a NaN.

    Measuring nodes directly follow the node that outputs the value, so that values are not kept longer than the graph
    needs them.
    """
    import onnx

    make = onnx.helper.make_node
    measure = set(names)
    nodes: list[Any] = []
    for node in lowered.model.graph.node:
        nodes.append(node)
        for name in measure.intersection(node.output):
            at, wide = f"{name}/range", name
            if lowered.values[name] == FLOAT16:  # a constant
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
    for which in ("largest", "nan"):
        nodes.append(make("Concat", [f"{name}/range/{which}" for name in names], [which], f"range/{which}", axis=0))
    model = onnx.ModelProto()
    model.CopyFrom(lowered.model)
    graph = model.graph
    del graph.node[:], graph.output[:]
    graph.node.extend(nodes)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.float32), "range/zero"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1], np.int64), "range/flat"))
    for which in ("largest", "nan"):
        graph.output.append(onnx.helper.make_tensor_value_info(which, FLOAT, [len(names)]))
    made = {f"{name}/range/{which}": FLOAT for name in names for which in ("largest", "nan")}
    return Lowered(model, lowered.operators, lowered.node_of, {**lowered.values, **made})
