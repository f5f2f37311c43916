"""The process that verifies: `python -m sdflow.verify.worker`, spoken to by `sdflow.workers`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from sdflow.families import FAMILIES
from sdflow.units import spell_bytes
from sdflow.verify.cases import read_description
from sdflow.verify.judge import JudgeRequest, judge
from sdflow.verify.memory import require_memory
from sdflow.verify.reference import ReferenceRequest, compute
from sdflow.verify.selection import Selection
from sdflow.workers import serve_request


def work(request: Mapping[str, Any], phase: Callable[[str], None]) -> dict[str, Any]:
    """Compute the reference, where the request has one, then hold the artifacts to it.

    Raises VerificationError where the memory does not suffice.
    """
    wanted = ReferenceRequest.from_json(request["reference"]) if request["reference"] is not None else None
    judged = JudgeRequest.from_json(request["judge"])
    _require_memory(wanted, judged, phase)
    computed = None
    if wanted is not None:
        computed = compute(wanted, phase)
        gc.collect()  # the modules, before the graphs come
    return {"reference": computed, "verification": judge(judged, phase).to_json()}


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
