"""First part of the proof for a 16-bit or quantized artifact: without rounding, it computes what PyTorch computes.

The graph runs lowered, in float32 throughout, with the weights that the recipes give before rounding. Casts to 16 bits
become no-ops, the graph's own constants are unrounded too (`constants`), and quantized products become plain products
(`quantized`). Since nothing rounds, there is no allowance for rounding (`sdflow.tolerances`). Only the inputs of sines,
cosines and indices stay as in the artifact (`sdflow.verify.lowering`).

Second part, in `stored` and `judge`: the weights are the rounded results of the recipes, and 16-bit arithmetic loses no
more than PyTorch's.
"""

from __future__ import annotations

import gc
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdflow.artifact import MODEL_FILE
from sdflow.distance import relative_l2
from sdflow.errors import VerificationError
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.onnx_model.quantized import quantized_graph
from sdflow.tolerances import EXACT_AT_MOST, EXACT_LIMIT, EXACT_SHARE
from sdflow.verify.artifact.blocks import first_block, sizes_of, watch
from sdflow.verify.artifact.constants import take_constants
from sdflow.verify.artifact.graph import (
    RunnableGraph,
    read_graph,
    run_each,
    run_graph,
    scores_of,
    takes,
    values_in_pieces,
)
from sdflow.verify.artifact.quantized import take_out
from sdflow.verify.artifact.recipes import REMEDY, RecipeCheck, check_recipes
from sdflow.verify.artifact.stored import ExactWeights, StoredWeights, ahead
from sdflow.verify.finding import Finding
from sdflow.verify.lowering import PieceSession, lower, session_of
from sdflow.verify.lowering.builder import BFLOAT16, FLOAT, FLOAT16, HALVES
from sdflow.verify.reference.cases import Cases
from sdflow.verify.result import BlockVerdict, CaseDistance, ExactOutput

Exact = MutableMapping[str, "NDArray[Any]"]
"""Weight name -> its values before rounding."""

STILL_QUANTIZED = "its quantization could not be removed: it has unknown operators or recipes"
DAMAGED = "its recipes are damaged, so it could not run without rounding"
OTHER_GRAPH = (
    "The graph does not compute what the model computes, even without rounding. Rebuild it with --clean_cache; if "
)
OTHER_GRAPH += "that does not help, remove passes and fusions one by one (--set) until it passes."


@dataclass(frozen=True)
class Proof:
    """The result of the first part of the proof, for one submodel.

    findings: on recipes and stored weights. weights: number of weights recomputed. outputs: of the exact run; none
    for a float32 artifact, whose own run is exact. problems: why the graph fails. missing: why it was not run. block: where
    it deviates.
    """

    findings: Sequence[Finding]
    weights: int
    outputs: tuple[ExactOutput, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    block: BlockVerdict | None = None


def prove(check: RecipeCheck, cases: Cases, *, threads: int | None = None, most: int | None = None) -> Proof:
    """Recompute every weight, and compare the graph without roundings with PyTorch. most: limit in bytes for weights in
    memory, as float32; None: all of them, once or twice.

    Raises VerificationError if there is no graph or it cannot be lowered.
    """
    model = read_graph(check.bound.folder / MODEL_FILE)
    exact_too = quantized_graph(model) is not None or any(
        tensor.data_type in HALVES for tensor in model.graph.initializer
    )
    proofs: list[Proof] = []

    def run(weights: StoredWeights) -> None:
        if exact_too:
            proofs.append(_exact_run(check, model, weights, cases, threads, most))

    checked = check_recipes(check.structure, check.submodel, check.bound, run)
    if checked.damaged or not exact_too:
        return Proof(checked.findings, checked.count, missing=DAMAGED if exact_too else "")
    (proof,) = proofs
    return replace(proof, findings=[*checked.findings, *proof.findings], weights=checked.count)


def _exact_run(
    check: RecipeCheck, model: Any, weights: StoredWeights, cases: Cases, threads: int | None, most: int | None
) -> Proof:
    """The graph without roundings or quantization against PyTorch. Changes `model`."""
    changed = {tensor.name for tensor in model.graph.initializer if tensor.data_type in HALVES}
    proof = Proof((), 0)
    if quantized_graph(model) is not None:
        taken, wrong = take_out(model, weights.recipes)
        found = [Finding(check.submodel, "recipe", "error", MODEL_FILE, what, REMEDY) for what in wrong]
        proof = replace(proof, findings=found)
        if wrong or quantized_graph(model) is not None:
            return replace(proof, missing=STILL_QUANTIZED)
        changed.update(taken)
    names = [name for name in weights.changed if name in changed]
    if most is None:
        exact: Exact = dict(zip(names, ahead(weights.exact, names), strict=True))
    else:
        exact = ChainMap({}, ExactWeights(weights, names))  # type: ignore[arg-type]  # additions go into the first map
    return _proof(check, model, exact, cases, proof, threads, most)


def _proof(
    check: RecipeCheck, model: Any, exact: Exact, cases: Cases, proof: Proof, threads: int | None, most: int | None
) -> Proof:
    """Add the result of the exact run to the proof, and the graph's own constants to `exact`."""
    take_constants(model, exact)
    graph = open_exact(model, check.bound.folder, exact, threads=threads, most=most)
    brain = any(tensor.data_type == BFLOAT16 for tensor in model.graph.initializer)
    outputs, problems = _compare(graph, cases, EXACT_SHARE / 8 if brain else EXACT_SHARE)
    del graph
    gc.collect()
    block = None
    if problems and outputs:
        case = max(outputs, key=lambda each: each.distance / each.limit).case
        block = _first_block(check, model, exact, cases, case, threads, most)
        problems = [(f"{what}; {block.words()}", remedy) for what, remedy in problems]
    return replace(proof, outputs=tuple(outputs), problems=tuple(problems), block=block)


def locate(
    check: RecipeCheck, cases: Cases, case: str, *, threads: int | None = None, most: int | None = None
) -> BlockVerdict:
    """Find where a failing float32 artifact deviates. Raises VerificationError if it cannot be lowered."""
    return _first_block(check, read_graph(check.bound.folder / MODEL_FILE), {}, cases, case, threads, most)


def _first_block(
    check: RecipeCheck, model: Any, exact: Exact, cases: Cases, case: str, threads: int | None, most: int | None
) -> BlockVerdict:
    """Run a case again with every value of the graph and every block of the module exposed. Empties `exact` to free
    memory for the module. With a graph in pieces the module runs first, and only values that may be block results are
    kept."""
    inputs = next(cases.get(index, "inputs") for index, each in cases if each.name == case)
    kinds = lower(model, round_fp16=False, exact=exact.keys(), angles=True).values
    known = [name for name, kind in kinds.items() if kind in (FLOAT, FLOAT16)]  # numpy has no bfloat16
    opened = open_exact(model, check.bound.folder, exact, threads=threads, expose=known, most=most)
    if isinstance(opened.session, PieceSession):
        whole = watch(check.submodel, check.bound, inputs, most)
        sizes = sizes_of(whole)
        values = [value for value in values_in_pieces(opened, inputs) if value.size in sizes]
        return first_block(whole, values, case)
    values = [*run_graph(opened, inputs).values()]
    del opened
    exact.clear()
    gc.collect()
    return first_block(watch(check.submodel, check.bound, inputs), values, case)


def open_exact(
    model: Any,
    folder: Path,
    exact: Mapping[str, NDArray[Any]],
    *,
    threads: int | None = None,
    expose: Sequence[str] = (),
    most: int | None = None,
) -> RunnableGraph:
    """Open the graph with `exact` in place of its weights. expose: values to output as well. most: see `prove`.

    Raises VerificationError if the graph cannot be lowered or loaded.
    """
    ort = import_onnxruntime()
    scores = scores_of(model.graph)
    inputs = {item.name for item in model.graph.input if item.type.tensor_type.elem_type in HALVES}
    outside = dict.fromkeys([*([scores] if scores else ()), *expose])
    lowered = lower(model, round_fp16=False, expose=[*outside], exact=exact.keys() | inputs, angles=True)
    if most is not None:
        pieces = PieceSession(lowered, folder, most, threads or 0, exact=exact)
        return RunnableGraph(pieces, "float32", "lowered", {}, dict(lowered.operators), scores)
    used = {tensor.name for tensor in lowered.model.graph.initializer}
    given = {name: ort.OrtValue.ortvalue_from_numpy(values) for name, values in exact.items() if name in used}
    try:
        session = session_of(lowered, folder, threads=threads or 0, given=given)
    except onnxruntime_errors(ort) as error:
        raise VerificationError(f"ONNX Runtime cannot load it in float32: {error}", where=str(folder)) from error
    return RunnableGraph(session, "float32", "lowered", {}, dict(lowered.operators), scores, [given, exact])


def _compare(graph: RunnableGraph, cases: Cases, share: float) -> tuple[list[ExactOutput], list[tuple[str, str]]]:
    """Each output's case nearest to its limit, or farthest beyond. share: of PyTorch's loss in 16 bits."""
    ort = import_onnxruntime()
    worst: dict[str, ExactOutput] = {}
    chosen = [(index, case) for index, case in cases if takes(graph.session, cases.get(index, "inputs"))]
    runs = run_each(graph, [cases.get(index, "inputs") for index, _ in chosen])
    for index, case in chosen:
        try:
            outputs = next(runs)
        except VerificationError:
            return [], []  # an input that diffusers does not feed: reported when the graph itself runs
        except onnxruntime_errors(ort) as error:
            return [], [(f"without rounding it does not run at {case.name}: {error}", OTHER_GRAPH)]
        half = cases.get(index, "float16")
        for name, wanted in cases.get(index, "float32").items():
            if name in outputs:
                distance = exact_distance(outputs[name], wanted, half[name])
                limit = exact_limit(wanted, half[name], share)
                if name not in worst or distance / limit > worst[name].distance / worst[name].limit:
                    worst[name] = ExactOutput(name, distance, case.name, limit, distance <= limit)
    return [*worst.values()], [(_words(each), OTHER_GRAPH) for each in worst.values() if not each.passed]


def exact_limit(exact: np.ndarray, half: np.ndarray, share: float = EXACT_SHARE) -> float:
    """The limit for a case. exact, half: PyTorch's results. share: of the distance between them."""
    if exact.dtype == bool:
        return EXACT_LIMIT
    return min(EXACT_AT_MOST, max(EXACT_LIMIT, share * relative_l2(half, exact)))


def exact_distance(value: np.ndarray, exact: np.ndarray, half: np.ndarray) -> float:
    """Relative L2. Flags may match either PyTorch result: near a threshold, rounding decides."""
    if exact.dtype == bool:
        same = value.shape == exact.shape and bool(((value == exact) | (value == half)).all())
        return 0.0 if same else inf
    return relative_l2(value, exact)


def case_distances(cases: Cases, index: int, outputs: Mapping[str, np.ndarray]) -> list[CaseDistance]:
    """Distances of a case's outputs from PyTorch's. Flags have no yardstick."""
    case, half, found = cases.cases[index], cases.get(index, "float16"), []
    for name, exact in cases.get(index, "float32").items():
        if name in outputs:
            yardstick = 0.0 if exact.dtype == bool else relative_l2(half[name], exact)
            distance = exact_distance(outputs[name], exact, half[name])
            found.append(CaseDistance(case.name, case.group, name, case.step, case.timestep, distance, yardstick))
    return found


def _words(output: ExactOutput) -> str:
    if output.distance == inf:
        return f"without rounding, {output.name} has another shape, NaN or infinity at {output.case}"
    what = (
        f"without rounding, {output.name} is {output.distance:.2g} away from the fp32 PyTorch model (relative L2) at "
    )
    return f"{what}{output.case}, but only {output.limit:.0e} is allowed"
