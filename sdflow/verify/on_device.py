"""The artifacts on hardware that is here, with the kernels of its own provider, and with ours: held to the same yardstick as
the run on this machine's CPU beside it.

A submodel is loaded as a pipeline loads it (`sdflow.runtime.folder`). Nothing of this is kept in the cache: no digest tells
one device or driver from another.
"""

from __future__ import annotations

from pathlib import Path

from sdflow.artifact import MODEL_FILE
from sdflow.distance import relative_l2
from sdflow.errors import SdflowError
from sdflow.families.base import Family
from sdflow.machine.onnx_runtime import import_onnxruntime, onnxruntime_errors
from sdflow.runtime.folder import load_submodel
from sdflow.targets import TARGETS
from sdflow.verify.cases import Cases
from sdflow.verify.exact import exact_distance
from sdflow.verify.graph import read_graph
from sdflow.verify.judge_output import judge_output, output_problem
from sdflow.verify.result import CaseDistance, DeviceVerdict, OutputVerdict, SubmodelVerdict


def run_on_device(verdict: SubmodelVerdict, folder: Path, family: Family, target: str, cases: Cases) -> DeviceVerdict:
    """Run the cases of a submodel on a target that is here. folder: the pipeline's. verdict: of the run on the CPU."""
    failures: tuple[type[Exception], ...] = (SdflowError, *onnxruntime_errors(import_onnxruntime(TARGETS[target])))
    found: list[CaseDistance] = []
    at = "its loading"
    try:
        ports = {port.name for port in read_graph(folder / verdict.name / MODEL_FILE).graph.input}
        submodel = load_submodel(folder, verdict.name, TARGETS[target], family=family)
        for index, case in cases:
            if case.name in verdict.left_out:
                continue
            at = case.name
            given = cases.get(index, "inputs")
            outputs = submodel(**{name: given[name] for name in ports if name in given})
            half = cases.get(index, "float16")
            for name, exact in cases.get(index, "float32").items():
                if name in outputs:
                    yardstick = 0.0 if exact.dtype == bool else relative_l2(half[name], exact)
                    distance = exact_distance(outputs[name], exact, half[name])
                    found.append(
                        CaseDistance(case.name, case.group, name, case.step, case.timestep, distance, yardstick)
                    )
        submodel.unload()
    except failures as error:
        what = error.what if isinstance(error, SdflowError) else str(error)
        remedy = (error.remedy if isinstance(error, SdflowError) else None) or "The provider cannot run this graph."
        return DeviceVerdict(target, (), ((f"on {target} it fails at {at}: {' '.join(what.split())}", remedy),))
    outputs_of: list[OutputVerdict] = []
    problems: list[tuple[str, str]] = []
    for name in dict.fromkeys(each.output for each in found):
        of_output = [each for each in found if each.output == name]
        outputs_of.append(judge_output(name, verdict.precision, of_output))
        if not outputs_of[-1].passed:
            what, remedy = output_problem(outputs_of[-1], verdict.precision, of_output)
            problems.append((f"on {target}, {what}", remedy))
    return DeviceVerdict(target, tuple(outputs_of), tuple(problems))
