"""The first part of the proof of a float16 or quantized artifact: without its roundings it computes what PyTorch computes.

Its graph runs with every operator lowered and everything in float32, inputs and outputs too, on weights as their recipes
give them before they are rounded. Casts to float16 do nothing; the graph's own numbers are taken as they were before they
were rounded too (`sdflow.verify.artifact.constants`), and quantized products are products again
(`sdflow.verify.artifact.quantized`). Nothing is
left that rounds, so there is no allowance for it: see `sdflow.tolerances`. One thing stays as it is in the artifact: what
sines, cosines and indices are computed from
(`sdflow.verify.lowering`).

The second part, that the weights are what the recipes round to, and that float16 arithmetic loses no more than plain fp16
PyTorch, is in `sdflow.verify.artifact.stored` and `sdflow.verify.artifact.judge`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdflow.artifact import MODEL_FILE
from sdflow.distance import relative_l2
from sdflow.errors import VerificationError
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.onnx_model.quantized import quantized_graph
from sdflow.tolerances import EXACT_AT_MOST, EXACT_LIMIT, EXACT_SHARE
from sdflow.verify.artifact.blocks import first_block, watch
from sdflow.verify.artifact.constants import take_constants
from sdflow.verify.artifact.graph import RunnableGraph, read_graph, run_graph, scores_of, takes
from sdflow.verify.artifact.quantized import take_out
from sdflow.verify.artifact.recipes import REMEDY, RecipeCheck, check_recipes
from sdflow.verify.finding import Finding
from sdflow.verify.lowering import lower, session_of
from sdflow.verify.lowering.builder import FLOAT, FLOAT16
from sdflow.verify.reference.cases import Cases
from sdflow.verify.result import BlockVerdict, ExactOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STILL_QUANTIZED = "its quantization could not be taken out: it has operators or recipes that are not known here"
DAMAGED = "its recipes are damaged, so that it could not be run without rounding"
OTHER_GRAPH = (
    "The graph computes something else than the model, rounding aside. Build it again with --clean_cache; if that does "
)
OTHER_GRAPH += "not help, take passes and fusions out one by one (--set) until it passes."


@dataclass(frozen=True)
class Proof:
    """findings: of recipes and stored weights. weights: how many were computed again. outputs: of the exact run; none for
    a float32 artifact, whose own run is exact. problems: why the graph does not pass. missing: why it was not run. block: where
    it goes wrong."""

    findings: Sequence[Finding]
    weights: int
    outputs: tuple[ExactOutput, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    block: BlockVerdict | None = None


@dataclass
class ExactGraph:
    """A graph that rounds nothing, in a session, with what the session reads."""

    graph: RunnableGraph
    held: Sequence[Any] = field(repr=False)


def prove(check: RecipeCheck, cases: Cases, *, threads: int | None = None) -> Proof:
    """Compute every weight again, and hold the graph without roundings to PyTorch. Memory: the weights in float32, once or
    twice. Raises VerificationError when there is no graph, or one that cannot be lowered."""
    model = read_graph(check.bound.folder / MODEL_FILE)
    rounded = {tensor.name for tensor in model.graph.initializer if tensor.data_type == FLOAT16}
    quantized = quantized_graph(model) is not None
    weights = check_recipes(check.structure, check.submodel, check.bound, keep=bool(rounded) or quantized)
    if not rounded and not quantized:
        return Proof(weights.findings, weights.count)
    if weights.exact is None:
        return Proof(weights.findings, weights.count, missing=DAMAGED)
    findings, count = list(weights.findings), weights.count
    if quantized:
        taken, wrong = take_out(model, weights.recipes)
        findings += [Finding(check.submodel, "recipe", "error", MODEL_FILE, what, REMEDY) for what in wrong]
        if wrong or quantized_graph(model) is not None:
            return Proof(findings, count, missing=STILL_QUANTIZED)
        rounded.update(taken)
    exact = {name: values for name, values in weights.exact.items() if name in rounded}
    del weights  # or it would hold what _first_block lets go
    take_constants(model, exact)
    graph = open_exact(model, check.bound.folder, exact, threads=threads)
    outputs, problems = _compare(graph.graph, cases)
    del graph
    gc.collect()
    block = None
    if problems and outputs:
        case = max(outputs, key=lambda each: each.distance / each.limit).case
        block = _first_block(check, model, exact, cases, case, threads)
        problems = [(f"{what}; {block.words()}", remedy) for what, remedy in problems]
    return Proof(findings, count, tuple(outputs), tuple(problems), block=block)


def locate(check: RecipeCheck, cases: Cases, case: str, *, threads: int | None = None) -> BlockVerdict:
    """Where a float32 artifact goes wrong that does not pass. Raises VerificationError for one that cannot be lowered."""
    return _first_block(check, read_graph(check.bound.folder / MODEL_FILE), {}, cases, case, threads)


def _first_block(
    check: RecipeCheck,
    model: Any,
    exact: dict[str, NDArray[Any]],
    cases: Cases,
    case: str,
    threads: int | None,
) -> BlockVerdict:
    """Run a case once more, with every value of the graph and every block of the module in sight. Empties `exact`: the module
    takes its place in memory."""
    inputs = next(cases.get(index, "inputs") for index, each in cases if each.name == case)
    kinds = lower(model, round_fp16=False, exact=exact.keys()).values
    known = [name for name, kind in kinds.items() if kind in (FLOAT, FLOAT16)]
    graph = open_exact(model, check.bound.folder, exact, threads=threads, expose=known)
    values = [*run_graph(graph.graph, inputs).values()]
    del graph
    exact.clear()
    gc.collect()
    whole = watch(check.submodel, check.bound, inputs)
    return first_block(whole, values, case)


def open_exact(
    model: Any,
    folder: Path,
    exact: Mapping[str, NDArray[Any]],
    *,
    threads: int | None = None,
    expose: Sequence[str] = (),
) -> ExactGraph:
    """The graph with `exact` in place of its weights. expose: values that it gives besides its outputs.

    Raises VerificationError for a graph that cannot be lowered or loaded.
    """
    ort = import_onnxruntime()
    scores = scores_of(model.graph)
    inputs = {item.name for item in model.graph.input if item.type.tensor_type.elem_type == FLOAT16}
    outside = dict.fromkeys([*([scores] if scores else ()), *expose])
    lowered = lower(model, round_fp16=False, expose=[*outside], exact=exact.keys() | inputs, angles=True)
    used = {tensor.name for tensor in lowered.model.graph.initializer}
    given = {name: ort.OrtValue.ortvalue_from_numpy(values) for name, values in exact.items() if name in used}
    try:
        session = session_of(lowered, folder, threads=threads or 0, given=given)
    except onnxruntime_errors(ort) as error:
        raise VerificationError(f"ONNX Runtime cannot load it in float32: {error}", where=str(folder)) from error
    graph = RunnableGraph(session, "float32", "lowered", {}, dict(lowered.operators), scores)
    return ExactGraph(graph, [given, exact])


def _compare(graph: RunnableGraph, cases: Cases) -> tuple[list[ExactOutput], list[tuple[str, str]]]:
    """Every output at the case that is nearest to its limit, or farthest beyond."""
    ort = import_onnxruntime()
    worst: dict[str, ExactOutput] = {}
    for index, case in cases:
        inputs = cases.get(index, "inputs")
        if not takes(graph.session, inputs):
            continue
        try:
            outputs = run_graph(graph, inputs)
        except VerificationError:
            return [], []  # an input that diffusers does not feed: said where the graph itself is run
        except onnxruntime_errors(ort) as error:
            return [], [(f"without rounding it cannot be run at {case.name}: {error}", OTHER_GRAPH)]
        half = cases.get(index, "float16")
        for name, wanted in cases.get(index, "float32").items():
            if name in outputs:
                distance, limit = exact_distance(outputs[name], wanted, half[name]), exact_limit(wanted, half[name])
                if name not in worst or distance / limit > worst[name].distance / worst[name].limit:
                    worst[name] = ExactOutput(name, distance, case.name, limit, distance <= limit)
    return [*worst.values()], [(_words(each), OTHER_GRAPH) for each in worst.values() if not each.passed]


def exact_limit(exact: np.ndarray, half: np.ndarray) -> float:
    """What holds for a case. exact, half: PyTorch's results."""
    if exact.dtype == bool:
        return EXACT_LIMIT
    return min(EXACT_AT_MOST, max(EXACT_LIMIT, EXACT_SHARE * relative_l2(half, exact)))


def exact_distance(value: np.ndarray, exact: np.ndarray, half: np.ndarray) -> float:
    """Relative L2. A flag may be that of either PyTorch: at a threshold, rounding decides."""
    if exact.dtype == bool:
        same = value.shape == exact.shape and bool(((value == exact) | (value == half)).all())
        return 0.0 if same else inf
    return relative_l2(value, exact)


def _words(output: ExactOutput) -> str:
    if output.distance == inf:
        return f"without rounding, {output.name} has another shape, NaN or infinity at {output.case}"
    what = (
        f"without rounding, {output.name} is {output.distance:.2g} away from the fp32 PyTorch model (relative L2) at "
    )
    return f"{what}{output.case}, at most {output.limit:.0e} is allowed"
