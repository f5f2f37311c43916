"""Which nodes of a float16 artifact come near the end of float16's range along the trajectory, or past it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sdflow.artifact import MODEL_FILE
from sdflow.onnx_model.reading import load_graph
from sdflow.verify.artifact.overflow import LARGEST_FLOAT16, NodeRange, ranges
from sdflow.verify.finding import Finding
from sdflow.verify.reference.cases import Cases

NEAR = 0.5
"""From this share of float16's largest number on, a value is worth a warning: another seed may go further."""
NAMED = 10


@dataclass(frozen=True)
class Overflow:
    """findings: nodes whose values leave float16's range, as errors, and that come near, as warnings; the largest first.

    suspects: names of the nodes that put out a value that leaves the range, or read one, in the order of the graph.
    """

    findings: Sequence[Finding] = ()
    suspects: Sequence[str] = ()


def overflow(submodel: str, folder: Path, cases: Cases, *, threads: int = 0, most: int | None = None) -> Overflow:
    """Look for values of an artifact that float16 does not hold, or hardly.

    Values are measured without being rounded to float16, so that the first overflow does not hide behind the NaN that
    it leads to. most: as of `open_graph`.
    Raises VerificationError for a graph that cannot be lowered.
    """
    import onnx

    path = (folder / MODEL_FILE).resolve()
    graph = load_graph(path).graph
    types = {port.name: onnx.helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type) for port in graph.input}
    chosen = [index for index, case in cases if case.group in ("trajectory", "prompt")]
    feeds = [
        {name: value.astype(types[name]) for name, value in cases.get(index, "inputs").items()} for index in chosen
    ]
    found = ranges(path, feeds, round_fp16=False, threads=threads, most=most)
    measured = [each for each in found if each.float16 and each.exceeds(NEAR)]
    measured.sort(key=lambda each: (each.nan_step is None, -each.largest))
    large = {each.value for each in measured if each.exceeds(1.0)}
    suspects = [node.name for node in graph.node if large.intersection((*node.input, *node.output))]
    listed = ", ".join(suspects)
    names = [cases.cases[index].name for index in chosen]
    findings = [_finding(submodel, each, names, listed) for each in measured[:NAMED]]
    return Overflow(findings, suspects)


def _finding(submodel: str, found: NodeRange, cases: Sequence[str], overflowing: str) -> Finding:
    value, step = (f"{found.largest:.3g}", found.largest_step) if found.nan_step is None else ("NaN", found.nan_step)
    what = f"{found.operator} gives {value} at {cases[step]}; float16 ends at {LARGEST_FLOAT16:.0f}"
    if not found.exceeds(1.0):
        remedy = f"If another seed overflows: OnnxFloatToFloat16 {{node_block_list: [{found.node}]}}"
        return Finding(submodel, "overflow", "warning", found.node, what, remedy)
    remedy = (
        f"Keep in fp32 what puts it out and what reads it, OnnxFloatToFloat16 {{node_block_list: [{overflowing}]}} "
    )
    remedy += "(sdflow verify --fix finds the smallest list that does), or take weights made for fp16"
    return Finding(submodel, "overflow", "error", found.node, what, remedy)
