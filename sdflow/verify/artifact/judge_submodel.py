"""Run one submodel's cases with its graph and compare them with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sdflow.errors import VerificationError
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.verify.artifact.exact import case_distances
from sdflow.verify.artifact.graph import RunnableGraph, run_each, takes
from sdflow.verify.artifact.judge_output import judge_outputs
from sdflow.verify.lowering import PieceSession
from sdflow.verify.reference.cases import Cases
from sdflow.verify.result import CaseDistance, SubmodelVerdict


@dataclass
class Further:
    """Another run of a graph: its inputs, and its outputs once known."""

    inputs: Mapping[str, np.ndarray]
    outputs: dict[str, np.ndarray] | None = None


def judge_submodel(
    submodel: str, graph: RunnableGraph, cases: Cases, stated: float | None = None, further: Further | None = None
) -> SubmodelVerdict:
    """Run every case that the graph's shapes allow, and judge each output. stated: the workflow's limit for a quantized
    graph. further: run along with the cases if the graph is in pieces."""
    ort = import_onnxruntime()
    found: list[CaseDistance] = []
    problems: list[tuple[str, str]] = []
    fitting = {index: cases.get(index, "inputs") for index, _ in cases}
    fitting = {index: inputs for index, inputs in fitting.items() if takes(graph.session, inputs)}
    left_out = [case.name for index, case in cases if index not in fitting]
    more = [further.inputs] if further is not None and isinstance(graph.session, PieceSession) else []
    runs = run_each(graph, [*fitting.values(), *more])
    for index in fitting:
        case = cases.cases[index]
        try:
            outputs = next(runs)
        except VerificationError as error:
            problems.append((error.what, error.remedy or ""))
            break
        except onnxruntime_errors(ort) as error:
            problems.append((f"it does not run at {case.name}: {error}", "The graph does not take these shapes."))
            break
        problems += [
            (f"it has no output {name}", "No pass may rename inputs or outputs.")
            for name in cases.get(index, "float32")
            if name not in outputs
        ]
        found += case_distances(cases, index, outputs)
        if problems:
            break
    if more and further is not None and not problems and found:
        further.outputs = next(runs)
    if not problems and not found:
        problems.append(("no case fits its fixed shapes", "Name its size in pixels under verify: {height:, width:}."))
    verdicts, too_far_away = judge_outputs(graph.precision, found, stated)
    return SubmodelVerdict(
        name=submodel,
        precision=graph.precision,
        ran=graph.ran,
        operators=graph.operators,
        lowered=graph.lowered,
        outputs=tuple(verdicts),
        cases=tuple(found),
        problems=(*problems, *too_far_away),
        left_out=tuple(left_out),
    )
