"""Compare the artifacts with the reference, one submodel in memory at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from sdflow.artifact import CONFIG_FILE, MODEL_FILE
from sdflow.disk.input_file import read_json
from sdflow.errors import VerificationError
from sdflow.families import FAMILIES
from sdflow.families.shared.base import Family
from sdflow.onnx_model.reading import load_graph
from sdflow.runtime.sessions.tuning import Tuning
from sdflow.targets import TARGETS
from sdflow.verify import images
from sdflow.verify.artifact.exact import Proof, locate, prove
from sdflow.verify.artifact.graph import RunnableGraph, open_graph, run_each, run_graph
from sdflow.verify.artifact.judge_output import judge_outputs
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.artifact.judge_submodel import Further, judge_submodel
from sdflow.verify.artifact.on_device import run_on_device
from sdflow.verify.artifact.overflow import Overflow, overflow
from sdflow.verify.artifact.promises import check_promises, read_configs
from sdflow.verify.artifact.roundings import DRAWS, Roundings, drawn_again, too_far
from sdflow.verify.artifact.unsupported_nodes import fits, fits_elsewhere
from sdflow.verify.finding import Finding, errors
from sdflow.verify.reference.cases import Cases, read_cases
from sdflow.verify.reference.selection import read_selection
from sdflow.verify.result import HALVES, SubmodelVerdict, Verification

VERSION = 11
"""Part of the key of a verdict. Increase it whenever verdicts may change."""
USES = ("diffusers", "numpy", "onnx", "onnxruntime", "peft", "torch", "transformers")
Progress = Callable[[str], None]


def judge(request: JudgeRequest, progress: Progress) -> Verification:
    """Run every submodel's cases, then generate the image with all of them. One graph is in memory at a time."""
    desk = Desk(request, progress)
    desk.prove()
    selection, family, found = read_selection(request.reference), desk.family, desk.verdicts
    image = meaning = None
    needed = family.needed(read_configs(request.folder, request.submodels))
    if {*needed} <= {*request.submodels}:
        try:
            drawn = images.draw(desk.run, family, request.folder, selection, request.reference)
        except _Unusable:
            pass  # an unusable submodel has reported why
        else:
            precision = images.precision_of(found[name].precision for name in needed)
            image = images.judge_image(drawn.image, selection, request.reference, precision, request.out)
            meaning = images.judge_meaning(drawn.sample, selection, request.reference)
    for name in request.submodels:
        if name not in found:
            desk.open(name)
    desk.close()
    desk.round_otherwise()
    desk.locate()
    covered = desk.show_references()
    if request.run_on is not None:
        desk.run_on_device(request.run_on)
    overflows = desk.overflows()
    findings = [each for overflow in overflows.values() for each in overflow.findings]
    findings += [each for proof in desk.proofs.values() for each in proof.findings]
    progress("whether the graphs fit the target, and the folder's promises")
    redrawn = {name: len({each.case for each in verdict.cases if each.draws > 1}) for name, verdict in found.items()}
    return Verification(
        name=request.name,
        target=request.target,
        level=request.level,
        submodels={name: found[name] for name in request.submodels},
        image=image,
        meaning=meaning,
        findings=(*findings, *desk.findings()),
        overflowing={name: tuple(overflow.suspects) for name, overflow in overflows.items() if overflow.suspects},
        coverage=(
            *selection.coverage(family),
            *covered,
            *(
                f"{name}: {count} cases repeated with {DRAWS} random roundings, because a single run is inconclusive"
                for name, count in redrawn.items()
                if count
            ),
        ),
    )


def judge_on_device(request: JudgeRequest, known: Verification, progress: Progress) -> Verification:
    """Add the results on `run_on` to a known verification."""
    assert request.run_on is not None, "there is nothing else to do"
    desk = Desk(request, progress)
    desk.verdicts.update(known.submodels)
    desk.run_on_device(request.run_on)
    return replace(known, submodels=desk.verdicts)


class _Unusable(Exception):
    """A submodel failed in a way that makes generating the image impossible."""


class Desk:
    """The verdicts so far, and the open graph, or the denoiser and its ControlNets, which alternate. A graph is judged
    when first opened."""

    def __init__(self, request: JudgeRequest, progress: Progress) -> None:
        self.request = request
        self.progress = progress
        self.family: Family = FAMILIES[request.family]
        self.proofs: dict[str, Proof] = {}
        self.verdicts: dict[str, SubmodelVerdict] = {}
        self._roundings = {each.submodel: Roundings(each, request.reference) for each in request.modules}
        self._open: dict[str, RunnableGraph] = {}
        nets = self.family.nets(request.submodels).values()
        self._together = {self.family.denoiser, *nets} if nets else set()

    def _cases(self, submodel: str) -> Cases:
        return read_cases(self.request.reference, submodel)

    def _graph(self, submodel: str) -> RunnableGraph:
        request = self.request
        most = request.most.get(submodel)
        return open_graph(request.folder / submodel, request.target, threads=request.threads, most=most)

    def prove(self) -> None:
        """Run the first part of the proof for each submodel with recipes. A missing graph is reported when it is
        opened."""
        for check in self.request.recipes:
            name = check.submodel
            self.progress(f"{name}: without rounding")
            with suppress(VerificationError):
                most = self.request.most.get(name)
                self.proofs[name] = prove(check, self._cases(name), threads=self.request.threads, most=most)

    def run(self, submodel: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a submodel, loaded in place of the previous one. Raises _Unusable if its verdict is that it does not
        run."""
        further = Further(inputs)
        graph = self.open(submodel, further)
        if graph is None or any(output.distance == inf for output in self.verdicts[submodel].outputs):
            raise _Unusable
        return run_graph(graph, inputs) if further.outputs is None else further.outputs

    def close(self) -> None:
        """Release the open graph."""
        self._open.clear()
        gc.collect()

    def open(self, submodel: str, further: Further | None = None) -> RunnableGraph | None:
        """Open and judge the submodel's graph; None if it cannot be loaded. further: its next run, which a graph in
        pieces makes while each piece is loaded."""
        if submodel in self._open:
            return self._open[submodel]
        if not {submodel, *self._open} <= self._together:
            self.close()
        self.progress(f"{submodel}: loading")
        try:
            graph = self._graph(submodel)
        except VerificationError as error:
            problem = (error.what, error.remedy or "Build it again: sdflow run --clean_cache.")
            self.verdicts[submodel] = SubmodelVerdict(submodel, "unknown", "not at all", {}, {}, (), (), (problem,))
            return None
        if submodel not in self.verdicts:
            self.progress(f"{submodel}: comparing with PyTorch")
            quantized = self.request.quantized.get(submodel, {})
            verdict = judge_submodel(submodel, graph, self._cases(submodel), quantized.get("limit"), further)
            verdict = replace(verdict, problems=(*verdict.problems, *_said_otherwise(verdict, quantized.get("to"))))
            self.verdicts[submodel] = self._with_proof(verdict)
        self._open[submodel] = graph
        return graph

    def _with_proof(self, verdict: SubmodelVerdict) -> SubmodelVerdict:
        """Add the exact run's results to the verdict; a float32 artifact's own run is exact."""
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

    def round_otherwise(self) -> None:
        """Judge 16-bit submodels again whose only fault is their distance, with many ways to round."""
        for name, verdict in self.verdicts.items():
            failed = [each for each in verdict.outputs if not each.passed]
            rounding, proof = self._roundings.get(name), self.proofs.get(name)
            if verdict.precision not in HALVES or rounding is None or len(verdict.problems) != len(failed):
                continue  # other faults are unrelated to rounding
            indices = rounding.indices(too_far(verdict.cases, failed))
            if not indices or (proof is not None and errors(proof.findings)):
                continue
            self.progress(f"{name}: rounding in {DRAWS} ways")
            graph = self._graph(name)
            distances = rounding.distances(indices, partial(run_each, graph))
            del graph  # before loading the module
            gc.collect()
            cases = drawn_again(verdict.cases, rounding, distances)
            outputs, problems = judge_outputs(verdict.precision, cases)
            self.verdicts[name] = replace(verdict, outputs=tuple(outputs), cases=cases, problems=tuple(problems))

    def locate(self) -> None:
        """Find the first deviating block of each failing float32 artifact that has recipes and ran."""
        for check in self.request.recipes:
            name, verdict = check.submodel, self.verdicts[check.submodel]
            failed = [each.name for each in verdict.outputs if not each.passed]
            if verdict.precision != "float32" or not failed:
                continue
            self.progress(f"{name}: looking for the first block that differs")
            worst = max((case for case in verdict.cases if case.output in failed), key=lambda case: case.distance)
            with suppress(VerificationError):  # without a graph to look into there is no block to name
                most = self.request.most.get(name)
                block = locate(check, self._cases(name), worst.case, threads=self.request.threads, most=most)
                problems = tuple((f"{what}; {block.words()}", remedy) for what, remedy in verdict.problems)
                self.verdicts[name] = replace(verdict, block=block, problems=problems)

    def show_references(self) -> Sequence[str]:
        """Judge the denoiser with reference images too, if its family supports them. Returns the coverage, in words."""
        from sdflow.verify.artifact.with_references import judge_references

        request, name = self.request, self.family.denoiser
        verdict = self.verdicts.get(name)
        module = next((each for each in request.modules if each.submodel == name), None)
        if self.family.references is None or verdict is None or not verdict.outputs or module is None:
            return ()
        self.close()
        self.progress(f"{name}: with reference images")
        problems, covered = judge_references(request, self.family, verdict.precision, self._cases(name), module)
        self.verdicts[name] = replace(verdict, problems=(*verdict.problems, *problems))
        return covered

    def run_on_device(self, target: str) -> None:
        """Add the results of the provider's own kernels for each submodel that ran on the CPU."""
        request, tuning = self.request, Tuning(**self.request.tuning)
        for name, verdict in self.verdicts.items():
            if verdict.outputs:
                self.progress(f"{name}: on {target}")
                rounding, stated = self._roundings.get(name), request.quantized.get(name, {}).get("limit")
                cases, folder = self._cases(name), request.folder
                device = run_on_device(verdict, folder, self.family, target, cases, rounding, stated, tuning)
                self.verdicts[name] = replace(verdict, device=device, problems=(*verdict.problems, *device.problems))
                gc.collect()

    def findings(self) -> list[Finding]:
        """Nodes without a kernel on the target, and broken promises of the folder."""
        request, target = self.request, TARGETS[self.request.target]
        found: list[Finding] = []
        for submodel in request.submodels:
            if self.verdicts[submodel].outputs:  # the graph runs
                path, read = (request.folder / submodel / MODEL_FILE).resolve(), self.family.part(submodel).read
                outputs = None if read is None else read(read_json(request.folder / submodel / CONFIG_FILE))
                graph = load_graph(path)
                found += fits(graph, target, submodel, read=outputs)
                found += fits_elsewhere(graph, target, submodel, read=outputs)
        if request.allow_fallback:
            found = [replace(each, level="warning") if each.level == "error" else each for each in found]
        compared = {name: request.digests[name] for name, proof in self.proofs.items() if not errors(proof.findings)}
        promises = check_promises(request.folder, target, family=self.family, compared=compared)
        return [*found, *(each for each in promises if each.submodel in request.submodels)]

    def overflows(self) -> dict[str, Overflow]:
        """Values out of float16's range. Needs another session: at the full level, and after non-finite results."""
        found = {}
        for name, verdict in self.verdicts.items():
            infinite = any(output.distance == inf for output in verdict.outputs)
            if (
                verdict.precision == "float16"
                and verdict.ran == "lowered"
                and (infinite or self.request.level == "full")
            ):
                self.progress(f"{name}: ranges of its values")
                threads, most = self.request.threads or 0, self.request.most.get(name)
                folder = self.request.folder / name
                found[name] = overflow(name, folder, self._cases(name), threads=threads, most=most)
        return found


def _said_otherwise(verdict: SubmodelVerdict, said: str | None) -> list[tuple[str, str]]:
    """The mismatch between sdflow.json and the graph about whether a submodel is quantized."""
    if (found := verdict.precision if verdict.quantized else None) == said:
        return []
    spelled = [f"quantized to {each}" if each else "not quantized" for each in (found, said)]
    return [(f"its graph is {spelled[0]}, and sdflow.json says that it is {spelled[1]}", "Build it again: sdflow run.")]
