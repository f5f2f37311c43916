"""The artifacts against the reference, one submodel in memory at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from sdflow.artifact import CONFIG_FILE, MODEL_FILE
from sdflow.disk.input_file import read_json
from sdflow.distance import relative_l2
from sdflow.errors import VerificationError
from sdflow.families import FAMILIES
from sdflow.families.shared.base import Family
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.sessions.tuning import Tuning
from sdflow.targets import TARGETS
from sdflow.verify import images
from sdflow.verify.artifact.exact import Proof, exact_distance, locate, prove
from sdflow.verify.artifact.graph import RunnableGraph, open_graph, run_each, run_graph, takes
from sdflow.verify.artifact.judge_output import judge_outputs
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.artifact.on_device import run_on_device
from sdflow.verify.artifact.overflow import Overflow, overflow
from sdflow.verify.artifact.promises import check_promises, read_configs
from sdflow.verify.artifact.roundings import DRAWS, Roundings, drawn_again, too_far
from sdflow.verify.artifact.unsupported_nodes import fits
from sdflow.verify.finding import Finding, errors
from sdflow.verify.reference.cases import Cases, read_cases
from sdflow.verify.reference.selection import read_selection
from sdflow.verify.result import HALVES, CaseDistance, SubmodelVerdict, Verification

VERSION = 11
"""Raise it whenever another verdict may come out: it is part of the key."""
USES = ("diffusers", "numpy", "onnx", "onnxruntime", "peft", "torch", "transformers")
Progress = Callable[[str], None]


def judge(request: JudgeRequest, progress: Progress) -> Verification:
    """Run every submodel's cases, then draw the image with all of them. One graph is in memory at a time."""
    proofs = _proofs(request, progress)
    desk, family = Desk(request, progress, proofs), FAMILIES[request.family]
    selection = read_selection(request.reference)
    image = meaning = None
    needed = family.needed(read_configs(request.folder, request.submodels))
    if {*needed} <= {*request.submodels}:
        try:
            drawn = images.draw(desk.run, family, request.folder, selection, request.reference)
        except _Unusable:
            pass  # a submodel that cannot be run or gives no numbers has said so; there is nothing to draw
        else:
            precision = images.precision_of(desk.verdicts[name].precision for name in needed)
            image = images.judge_image(drawn.image, selection, request.reference, precision, request.out)
            meaning = images.judge_meaning(drawn.sample, selection, request.reference)
    for name in request.submodels:
        if name not in desk.verdicts:
            desk.open(name)
    desk.close()
    roundings = {each.submodel: Roundings(each, request.reference) for each in request.modules}
    wrong = {name for name, proof in proofs.items() if errors(proof.findings)}
    _round_otherwise(
        request, desk.verdicts, {name: each for name, each in roundings.items() if name not in wrong}, progress
    )
    _locate(request, desk.verdicts, progress)
    if request.run_on is not None:
        _run_on_device(request, family, desk.verdicts, request.run_on, roundings, progress)
    overflows = _overflows(request, desk.verdicts, progress)
    findings = [each for found in overflows.values() for each in found.findings]
    findings += [each for proof in proofs.values() for each in proof.findings]
    progress("whether the graphs fit the target, and the folder's promises")
    return Verification(
        name=request.name,
        target=request.target,
        level=request.level,
        submodels={name: desk.verdicts[name] for name in request.submodels},
        image=image,
        meaning=meaning,
        findings=(*findings, *_findings(request, family, desk.verdicts)),
        overflowing={name: tuple(found.suspects) for name, found in overflows.items() if found.suspects},
        coverage=(*selection.coverage(family), *_drawn(desk.verdicts)),
    )


def judge_on_device(request: JudgeRequest, known: Verification, progress: Progress) -> Verification:
    """What is known of the artifacts, with what they give on `run_on` beside it."""
    assert request.run_on is not None, "there is nothing else to do"
    verdicts = dict(known.submodels)
    roundings = {each.submodel: Roundings(each, request.reference) for each in request.modules}
    _run_on_device(request, FAMILIES[request.family], verdicts, request.run_on, roundings, progress)
    return replace(known, submodels=verdicts)


def _round_otherwise(
    request: JudgeRequest, verdicts: dict[str, SubmodelVerdict], roundings: Mapping[str, Roundings], progress: Progress
) -> None:
    """Judge those again that are too far in 16 bits, and nothing else, by many ways to round. roundings: of those that may be."""
    for name, verdict in verdicts.items():
        failed = [each for each in verdict.outputs if not each.passed]
        rounding = roundings.get(name)
        if verdict.precision not in HALVES or rounding is None or len(verdict.problems) != len(failed):
            continue  # what else is wrong is no matter of rounding
        indices = rounding.indices(too_far(verdict.cases, failed))
        if not indices:
            continue
        progress(f"{name}: rounding in {DRAWS} ways")
        graph = open_graph(request.folder / name, request.target, threads=request.threads, most=request.most.get(name))
        distances = rounding.distances(indices, partial(run_each, graph))
        del graph  # before the module comes
        gc.collect()
        cases = drawn_again(verdict.cases, rounding, distances)
        outputs, problems = judge_outputs(verdict.precision, cases)
        verdicts[name] = replace(verdict, outputs=tuple(outputs), cases=cases, problems=tuple(problems))


def _drawn(verdicts: Mapping[str, SubmodelVerdict]) -> list[str]:
    """What was rounded in several ways, in words."""
    return [
        f"{name}: {count} cases rounded in {DRAWS} ways, as one run says little of them"
        for name, verdict in verdicts.items()
        if (count := len({each.case for each in verdict.cases if each.draws > 1}))
    ]


def _locate(request: JudgeRequest, verdicts: dict[str, SubmodelVerdict], progress: Progress) -> None:
    """Name the first block that differs of each float32 artifact with recipes that ran and does not pass."""
    for check in request.recipes:
        verdict = verdicts[check.submodel]
        failed = [each.name for each in verdict.outputs if not each.passed]
        if verdict.precision != "float32" or not failed:
            continue
        progress(f"{check.submodel}: looking for the first block that differs")
        worst = max((case for case in verdict.cases if case.output in failed), key=lambda case: case.distance)
        try:
            cases = read_cases(request.reference, check.submodel)
            most = request.most.get(check.submodel)
            block = locate(check, cases, worst.case, threads=request.threads, most=most)
        except VerificationError:
            continue  # there is no graph to look into but the one that was run
        problems = [(f"{what}; {block.words()}", remedy) for what, remedy in verdict.problems]
        verdicts[check.submodel] = replace(verdict, block=block, problems=tuple(problems))


def _run_on_device(
    request: JudgeRequest,
    family: Family,
    verdicts: dict[str, SubmodelVerdict],
    target: str,
    roundings: Mapping[str, Roundings],
    progress: Progress,
) -> None:
    """Put what the provider's own kernels give beside what the CPU gave, of each submodel that ran there."""
    for name, verdict in verdicts.items():
        if verdict.outputs:
            progress(f"{name}: on {target}")
            cases = read_cases(request.reference, name)
            stated = request.quantized.get(name, {}).get("limit")
            tuning = Tuning(**request.tuning)
            device = run_on_device(verdict, request.folder, family, target, cases, roundings.get(name), stated, tuning)
            verdicts[name] = replace(verdict, device=device, problems=(*verdict.problems, *device.problems))
            gc.collect()


def _proofs(request: JudgeRequest, progress: Progress) -> dict[str, Proof]:
    """The first part of the proof, of each submodel that has recipes. None of one without a graph: that is said when it is
    opened."""
    found = {}
    for check in request.recipes:
        progress(f"{check.submodel}: without rounding")
        try:
            cases, most = read_cases(request.reference, check.submodel), request.most.get(check.submodel)
            found[check.submodel] = prove(check, cases, threads=request.threads, most=most)
        except VerificationError:
            continue
    return found


def _findings(request: JudgeRequest, family: Family, verdicts: Mapping[str, SubmodelVerdict]) -> list[Finding]:
    """What the target has no kernel for, and what the folder promises and does not keep."""
    target = TARGETS[request.target]
    found: list[Finding] = []
    for submodel in request.submodels:
        if verdicts[submodel].outputs:  # it is a graph that runs
            path, read = (request.folder / submodel / MODEL_FILE).resolve(), family.part(submodel).read
            config = read_json(request.folder / submodel / CONFIG_FILE)
            outputs = None if read is None else read(config)
            found += fits(load_graph(path), target, submodel, read=outputs)
    if request.allow_fallback:
        found = [replace(each, level="warning") if each.level == "error" else each for each in found]
    promises = check_promises(request.folder, target, family=family)
    found += [each for each in promises if each.submodel in request.submodels]
    return found


def _overflows(
    request: JudgeRequest, verdicts: Mapping[str, SubmodelVerdict], progress: Progress
) -> dict[str, Overflow]:
    """Values that float16 does not hold. They cost another session: at the full level, and where a result is not finite."""
    found = {}
    for submodel, verdict in verdicts.items():
        infinite = any(output.distance == inf for output in verdict.outputs)
        if verdict.precision == "float16" and verdict.ran == "lowered" and (infinite or request.level == "full"):
            progress(f"{submodel}: ranges of its values")
            cases = read_cases(request.reference, submodel)
            folder = request.folder / submodel
            most = request.most.get(submodel)
            found[submodel] = overflow(submodel, folder, cases, threads=request.threads or 0, most=most)
    return found


class _Unusable(Exception):
    """A submodel whose verdict is known to be bad and that cannot go on to draw."""


class Desk:
    """Holds the one graph that is open, or the denoiser with its ControlNets, which take turns; a graph that is opened for the
    first time is judged at once."""

    def __init__(self, request: JudgeRequest, progress: Progress, proofs: Mapping[str, Proof]) -> None:
        self.request = request
        self.progress = progress
        self.proofs = proofs
        self.verdicts: dict[str, SubmodelVerdict] = {}
        self._open: dict[str, RunnableGraph] = {}
        family = FAMILIES[request.family]
        nets = family.nets(request.submodels).values()
        self._together = {family.denoiser, *nets} if nets else set()

    def run(self, submodel: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a submodel, loaded in place of the one before. Raises _Unusable when its verdict is that it cannot be."""
        graph = self.open(submodel)
        if graph is None or any(output.distance == inf for output in self.verdicts[submodel].outputs):
            raise _Unusable
        return run_graph(graph, inputs)

    def close(self) -> None:
        """Let go of what is open."""
        self._open.clear()
        gc.collect()

    def open(self, submodel: str) -> RunnableGraph | None:
        """The submodel's graph, judged; None if it cannot be loaded."""
        if submodel in self._open:
            return self._open[submodel]
        if not {submodel, *self._open} <= self._together:
            self.close()
        self.progress(f"{submodel}: loading")
        try:
            graph = open_graph(
                self.request.folder / submodel,
                self.request.target,
                threads=self.request.threads,
                most=self.request.most.get(submodel),
            )
        except VerificationError as error:
            problem = (error.what, error.remedy or "Build it again: sdflow run --clean_cache.")
            self.verdicts[submodel] = SubmodelVerdict(submodel, "unknown", "not at all", {}, {}, (), (), (problem,))
            return None
        if submodel not in self.verdicts:
            self.progress(f"{submodel}: comparing with PyTorch")
            cases, quantized = read_cases(self.request.reference, submodel), self.request.quantized.get(submodel, {})
            verdict = judge_submodel(submodel, graph, cases, quantized.get("limit"))
            verdict = replace(verdict, problems=(*verdict.problems, *_said_otherwise(verdict, quantized.get("to"))))
            self.verdicts[submodel] = self._with_proof(verdict)
        self._open[submodel] = graph
        return graph

    def _with_proof(self, verdict: SubmodelVerdict) -> SubmodelVerdict:
        """The verdict with what the exact run says; of a float32 artifact, this run is exact."""
        proof = self.proofs.get(verdict.name)
        if proof is None:
            return replace(verdict, unproved=self.request.unproved.get(verdict.name, ""))
        return replace(
            verdict,
            exact=proof.outputs,
            weights=proof.weights,
            unproved=proof.missing,
            block=proof.block,
            problems=(*proof.problems, *verdict.problems),
        )


def _said_otherwise(verdict: SubmodelVerdict, said: str | None) -> list[tuple[str, str]]:
    """What is wrong where sdflow.json says that a submodel is quantized and its graph is not, or the other way round."""
    if (found := verdict.precision if verdict.quantized else None) == said:
        return []
    spelled = [f"quantized to {each}" if each else "not quantized" for each in (found, said)]
    return [(f"its graph is {spelled[0]}, and sdflow.json says that it is {spelled[1]}", "Build it again: sdflow run.")]


def judge_submodel(submodel: str, graph: RunnableGraph, cases: Cases, stated: float | None = None) -> SubmodelVerdict:
    """Run every case that the graph's shapes allow, and hold each output to the yardstick. stated: the workflow's limit, for a
    graph that is quantized."""
    ort = import_onnxruntime()
    found: list[CaseDistance] = []
    problems: list[tuple[str, str]] = []
    fitting = {index: cases.get(index, "inputs") for index, _ in cases}
    fitting = {index: inputs for index, inputs in fitting.items() if takes(graph.session, inputs)}
    left_out = [case.name for index, case in cases if index not in fitting]
    runs = run_each(graph, [*fitting.values()])
    for index in fitting:
        case = cases.cases[index]
        try:
            outputs = next(runs)
        except VerificationError as error:
            problems.append((error.what, error.remedy or ""))
            break
        except onnxruntime_errors(ort) as error:
            problems.append((f"it cannot be run at {case.name}: {error}", "The graph does not take these shapes."))
            break
        exact, half = cases.get(index, "float32"), cases.get(index, "float16")
        for name, wanted in exact.items():
            if name not in outputs:
                problems.append((f"it has no output {name}", "No pass may rename inputs or outputs."))
                continue
            distances = exact_distance(outputs[name], wanted, half[name]), _yardstick(wanted, half[name])
            found.append(CaseDistance(case.name, case.group, name, case.step, case.timestep, *distances))
        if problems:
            break
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


def _yardstick(exact: np.ndarray, half: np.ndarray) -> float:
    """Of fp16 PyTorch; flags have none."""
    return 0.0 if exact.dtype == bool else relative_l2(half, exact)
