"""What ONNX Runtime raises when a provider cannot run a graph, in words."""

from __future__ import annotations

import re

from sdflow.errors import VerificationError

MOST_SAID = 1000
"""Characters of what ONNX Runtime says: names of a graph may be of any length."""

_NO_FLOAT16 = "requires f16 but the device does not support it"

_NO_KERNEL = re.compile(
    r"(?:Failed to find kernel for|Could not find an implementation for) (?P<operator>[\w.]+)\(\d+\)"
    r"(?: node with name '(?P<named>[^']*)'| \(node:'(?P<node>[^']*)')?"
)


def cannot_run(
    provider: str,
    error: Exception,
    *,
    where: str | None = None,
    target: str | None = None,
    built_for: str | None = None,
) -> VerificationError:
    """The failure of a session that could not be made or run.

    target: what it was loaded on; built_for: the target of the pipeline, where it is known.
    """
    said = str(error)
    if _NO_FLOAT16 in said:
        return VerificationError(
            f"{provider} cannot run this graph: the GPU's adapter has no float16 (WebGPU's shader-f16)",
            where=where,
            remedy="Build it in float32: `precision: float32` for each submodel of the workflow; see docs/targets.md.",
        )
    found = _NO_KERNEL.search(said)
    if found is None:
        return VerificationError(f"{provider} cannot run this graph: {said[:MOST_SAID]}", where=where)
    operator, node = found["operator"].removeprefix("ai.onnx."), found["named"] or found["node"]
    at = f" (node {node[:MOST_SAID]})" if node else ""
    return VerificationError(
        f"{provider} cannot run this graph: it has no kernel for {operator}{at}",
        where=where,
        remedy=_remedy(target, built_for),
    )


def _remedy(target: str | None, built_for: str | None) -> str | None:
    if target is None or built_for is None:
        return None
    if target == built_for:
        return "See what it lacks: sdflow verify PIPELINE; leave out the pass that makes this operator."
    here = "the CPU" if target == "cpu" else target
    return (
        f"The pipeline is built for {built_for}: run it there, or build it for {here} (sdflow run --target {target})."
    )
