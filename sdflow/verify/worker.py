"""The process that verifies: `python -m sdflow.verify.worker`, spoken to by `sdflow.workers`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from sdflow.verify.judge import JudgeRequest, judge
from sdflow.verify.reference import ReferenceRequest, compute
from sdflow.workers import serve_request


def work(request: Mapping[str, Any], phase: Callable[[str], None]) -> dict[str, Any]:
    """Compute the reference, where the request has one, then hold the artifacts to it."""
    computed = None
    if request["reference"] is not None:
        computed = compute(ReferenceRequest.from_json(request["reference"]), phase)
        gc.collect()  # the modules, before the graphs come
    return {"reference": computed, "verification": judge(JudgeRequest.from_json(request["judge"]), phase).to_json()}


if __name__ == "__main__":
    serve_request(work)
