"""Run the artifacts on local hardware, with its provider's kernels and ours, judged like the run on this machine's CPU.

A submodel is loaded as a pipeline loads it (`sdflow.runtime.files.folder`), with the choice of `sdflow tune` for this
machine. Nothing is cached, since no digest identifies a device or driver.

On a GPU emulated by the processor, one run of a denoiser takes seconds. Equal shapes run the same kernels, so of cases
with equal shapes only the first and the last run there: the ends of the trajectory and of the timesteps, the first and
the longest prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sdflow.artifact import MODEL_FILE
from sdflow.errors import SdflowError
from sdflow.families.shared.base import Family
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.machine.plugins import is_emulated
from sdflow.runtime.files.folder import load_submodel
from sdflow.runtime.sessions.session import LoadOptions
from sdflow.runtime.sessions.tuning import UNTUNED, Tuning
from sdflow.targets import TARGETS
from sdflow.verify.artifact.exact import case_distances
from sdflow.verify.artifact.graph import read_graph
from sdflow.verify.artifact.judge_output import judge_outputs
from sdflow.verify.artifact.roundings import Roundings, drawn_again, too_far
from sdflow.verify.reference.cases import Case, Cases
from sdflow.verify.result import HALVES, CaseDistance, DeviceVerdict, SubmodelVerdict


def run_on_device(
    verdict: SubmodelVerdict,
    folder: Path,
    family: Family,
    target: str,
    cases: Cases,
    roundings: Roundings | None,
    stated: float | None = None,
    tuning: Tuning = UNTUNED,
) -> DeviceVerdict:
    """Run the cases of a submodel on an available target. folder: the pipeline's. verdict: of the CPU run. roundings:
    for cases that are too far off. stated: the workflow's limit, if quantized. tuning: how it is loaded."""
    ort = import_onnxruntime(TARGETS[target])
    failures: tuple[type[Exception], ...] = (SdflowError, *onnxruntime_errors(ort))
    found: list[CaseDistance] = []
    left_out = 0
    at = "its loading"
    try:
        ports = {port.name for port in read_graph(folder / verdict.name / MODEL_FILE).graph.input}
        wanted = TARGETS[target]
        lazy = wanted.session.static_shapes  # one session per shape, created on demand
        submodel = load_submodel(
            folder, verdict.name, wanted, family=family, lazy=lazy, options=LoadOptions(tuning=tuning)
        )

        def run(given: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            outputs: Mapping[str, np.ndarray] = submodel(**{name: given[name] for name in ports if name in given})
            return outputs

        groups = _by_shapes(cases, verdict.left_out)
        if is_emulated(ort, wanted):
            left_out = sum(max(0, len(group) - 2) for group in groups)
            groups = [group if len(group) < 3 else [group[0], group[-1]] for group in groups]
        for index, case in chain.from_iterable(groups):
            at = case.name
            found += case_distances(cases, index, run(cases.get(index, "inputs")))
        judged, problems = judge_outputs(verdict.precision, found, stated, on_device=True)
        far = too_far(found, judged) if verdict.precision in HALVES else []
        distances = roundings.distances(roundings.indices(far), partial(map, run)) if roundings is not None else {}
        submodel.unload()
    except failures as error:
        what = error.what if isinstance(error, SdflowError) else str(error)
        remedy = (error.remedy if isinstance(error, SdflowError) else None) or "The provider cannot run this graph."
        return DeviceVerdict(target, (), ((f"on {target} it fails at {at}: {' '.join(what.split())}", remedy),))
    if distances and roundings is not None:
        judged, problems = judge_outputs(verdict.precision, drawn_again(found, roundings, distances), on_device=True)
    findings = tuple((f"on {target}, {what}", remedy) for what, remedy in problems)
    return DeviceVerdict(target, tuple(judged), findings, "" if tuning == UNTUNED else str(tuning), left_out)


def _by_shapes(cases: Cases, without: Collection[str]) -> list[list[tuple[int, Case]]]:
    """The cases whose inputs have the same shapes together: a target with static shapes makes one session for them."""
    found: dict[Any, list[tuple[int, Case]]] = {}
    for index, case in cases:
        if case.name not in without:
            shapes = frozenset((name, array.shape) for name, array in cases.get(index, "inputs").items())
            found.setdefault(shapes, []).append((index, case))
    return list(found.values())
