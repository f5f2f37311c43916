"""The process that verifies: `python -m sdflow.verify.worker`, spoken to by `sdflow.processes.workers`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from sdflow.errors import UsageError
from sdflow.families import FAMILIES
from sdflow.processes.workers import serve_request
from sdflow.units import spell_bytes
from sdflow.verify.artifact.judge import judge, judge_on_device
from sdflow.verify.artifact.judge_request import JudgeRequest
from sdflow.verify.ensemble import EnsembleRequest, judge_ensemble
from sdflow.verify.finding import Finding, errors
from sdflow.verify.folder import FolderRequest, Held, hold_folder
from sdflow.verify.memory import require_memory
from sdflow.verify.reference.cases import read_description
from sdflow.verify.reference.reference import compute
from sdflow.verify.reference.reference_request import ReferenceRequest
from sdflow.verify.reference.selection import Selection
from sdflow.verify.result import Verification


def work(request: Mapping[str, Any], phase: Callable[[str], None]) -> dict[str, Any]:
    """Compute the reference, where the request has one, then hold the artifacts to it, of which `known` only lacks the device; or
    what a base and its refiner draw.

    Raises VerificationError where the memory does not suffice.
    """
    if "ensemble" in request:
        return {"image": asdict(judge_ensemble(EnsembleRequest.from_json(request["ensemble"]), phase))}
    wanted = ReferenceRequest.from_json(request["reference"]) if request["reference"] is not None else None
    judged = JudgeRequest.from_json(request["judge"])
    if request["known"] is not None:
        known = Verification.from_json(request["known"])
        return {"verification": judge_on_device(judged, known, phase).to_json()}
    _require_memory(wanted, judged, phase)
    computed = None
    if wanted is not None:
        computed = compute(wanted, phase)
        gc.collect()  # the modules, before the graphs come
    held = hold_folder(FolderRequest.from_json(request["folder"]), phase)
    return {"reference": computed, "verification": _judged(judged, held, phase).to_json()}


def _judged(request: JudgeRequest, held: Held, phase: Callable[[str], None]) -> Verification:
    """The verification, with what was found in the folder beside the graphs."""
    findings = [asdict(each) for each in held.findings]
    try:
        found = judge(request, phase)
    except UsageError as error:
        if not errors([*held.findings]):
            raise
        # What lies beside the graphs is not what it should be, so that nothing can be drawn with them.
        stopped = Finding(
            "", "source", "error", error.where or "", f"nothing can be drawn: {error.what}", error.remedy or ""
        )
        return Verification(
            request.name, request.target, request.level, {}, None, None, findings=(*findings, asdict(stopped))
        )
    coverage = (*found.coverage, *_merged(request), held.coverage)
    return replace(found, findings=(*findings, *found.findings), coverage=coverage)


def _merged(request: JudgeRequest) -> list[str]:
    """How the reference got its LoRAs."""
    merged = read_description(request.reference)["merged"]
    return [f"{name} merged into {layers} layers by diffusers and PEFT" for name, layers in merged.items()]


def _require_memory(wanted: ReferenceRequest | None, judged: JudgeRequest, phase: Callable[[str], None]) -> None:
    import psutil

    selection = wanted.selection if wanted else Selection.from_json(read_description(judged.reference)["selection"])
    loads = wanted.loads if wanted else None
    free = psutil.virtual_memory().available
    family = FAMILIES[judged.family]
    needed = require_memory(family, loads, selection, judged.folder, judged.submodels, free)
    phase(f"needs about {spell_bytes(needed)} of memory, {spell_bytes(free)} are available")


if __name__ == "__main__":
    serve_request(work)
