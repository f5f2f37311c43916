"""The process that verifies: `python -m sdflow.verify.worker`, spoken to by `sdflow.workers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sdflow.verify.judge import JudgeRequest, judge
from sdflow.verify.reference import ReferenceRequest, compute
from sdflow.workers import serve_request


def work(request: Mapping[str, Any], phase: Callable[[str], None]) -> dict[str, Any]:
    """Compute a reference, or hold artifacts to one; which it is stands in the request under "work"."""
    content = {name: value for name, value in request.items() if name != "work"}
    if request["work"] == "reference":
        return compute(ReferenceRequest.from_json(content), phase)
    return judge(JudgeRequest.from_json(content), phase).to_json()


if __name__ == "__main__":
    serve_request(work)
