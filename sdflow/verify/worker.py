"""The verifying process, `python -m sdflow.verify.worker`, controlled by `sdflow.processes.workers`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.machine.memory import available_bytes, return_freed_memory
from sdflow.processes.in_worker import serve_request
from sdflow.units import spell_bytes
from sdflow.verify.artifact.judge import judge, judge_on_device
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.as_json import from_json
from sdflow.verify.ensemble import EnsembleRequest, judge_ensemble
from sdflow.verify.finding import Finding, errors
from sdflow.verify.folder import FolderRequest, Held, hold_folder
from sdflow.verify.memory import MemoryPlan, require_memory
from sdflow.verify.reference.cases import read_description
from sdflow.verify.reference.reference import compute
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.selection import read_selection
from sdflow.verify.result import Verification


def work(request: Mapping[str, Any], phase: Callable[[str], None]) -> dict[str, Any]:
    """Compute the reference, if requested, then judge the artifacts; with `known`, only run them on the device; with
    `ensemble`, only generate the joint image of base and refiner.

    Raises VerificationError if the memory does not suffice.
    """
    if "ensemble" in request:
        return {"image": asdict(judge_ensemble(from_json(EnsembleRequest, request["ensemble"]), phase))}
    wanted = from_json(ReferenceRequest, request["reference"]) if request["reference"] is not None else None
    judged = from_json(JudgeRequest, request["judge"])
    if request["known"] is not None:
        known = Verification.from_json(request["known"])
        return {"verification": judge_on_device(judged, known, phase).to_json()}
    plan = _memory_plan(wanted, judged, phase)
    modules = [replace(each, most=plan.streamed.get(each.submodel)) for each in judged.modules]
    judged = replace(judged, most=plan.streamed, modules=modules)
    computed = None
    if wanted is not None:
        computed = compute(replace(wanted, most=plan.streamed), phase)
        gc.collect()  # free the modules before loading graphs
    held = hold_folder(from_json(FolderRequest, request["folder"]), phase)
    return {"reference": computed, "verification": _judged(judged, held, phase).to_json()}


def _judged(request: JudgeRequest, held: Held, phase: Callable[[str], None]) -> Verification:
    """The verification, with the findings on the folder's other files."""
    try:
        found = judge(request, phase)
    except UsageError as error:
        if not errors(held.findings):
            raise
        # The folder's other files are wrong, so no image can be generated.
        stopped = Finding(
            "", "source", "error", error.where or "", f"no image can be generated: {error.what}", error.remedy or ""
        )
        return Verification(request.name, request.target, request.level, {}, None, None, (*held.findings, stopped))
    merged = read_description(request.reference)["merged"]  # how the reference merged its LoRAs
    coverage = [
        *found.coverage,
        *(f"{name} merged into {layers} layers by diffusers and PEFT" for name, layers in merged.items()),
        *(
            f"{name}: block by block, {spell_bytes(each)} of its weights at a time"
            for name, each in request.most.items()
        ),
        held.coverage,
    ]
    return replace(found, findings=(*held.findings, *found.findings), coverage=tuple(coverage))


def _memory_plan(wanted: ReferenceRequest | None, judged: JudgeRequest, phase: Callable[[str], None]) -> MemoryPlan:
    selection = wanted.selection if wanted else read_selection(judged.reference)
    free = available_bytes()
    allowed = free if judged.memory is None else min(free, judged.memory)
    family, loads = FAMILIES[judged.family], wanted.loads if wanted else None
    modules = {each.submodel: each.load for each in judged.modules}
    plan = require_memory(family, loads, selection, judged.folder, judged.submodels, allowed, modules)
    phase(f"{plan.words()}, {spell_bytes(free)} are available")
    if plan.streamed:
        return_freed_memory()  # pieces differ in size, so one would not fit into another's place
    return plan


if __name__ == "__main__":
    serve_request(work)
